"""What protection costs: measured ratios, never asserted. `python -m tests.benchmarks --help`."""
