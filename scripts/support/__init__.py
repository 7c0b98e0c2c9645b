"""What the scripts and the tests share. Run with .venv's Python and scripts/ in PYTHONPATH."""
