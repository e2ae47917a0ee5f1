"""SlowMo, a case of DiLoCo."""
