"""DiLoCo whose learners train at their own pace."""
