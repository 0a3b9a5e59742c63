"""Speed compared with other libraries, outside the package: python -m benchmarks.step, .data"""
