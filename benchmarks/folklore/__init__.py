"""What people repeat about training memory; precision.py, accumulation.py, ... hold the claims."""
