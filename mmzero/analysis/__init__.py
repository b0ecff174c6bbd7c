"""What a training step really costs: measured memory, traffic and time, beside the formulas."""
