"""The machine below a run: processes, random numbers, files and progress. No options, models or data."""
