"""Measure a part of ssvit beside its peers: python tools/benchmark.py part=step"""

from ssvit.cli.benchmark import main

if __name__ == "__main__":
    main()
