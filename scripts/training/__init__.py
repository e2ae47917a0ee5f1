"""What stands behind train.py and train_text.py: data, models, methods, checkpoints, records."""
