"""What techniques are made of."""
