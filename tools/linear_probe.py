"""A linear layer on an encoder's frozen features: python tools/linear_probe.py checkpoint=PATH"""

from ssvit.cli.linear_probe import main

if __name__ == "__main__":
    main()
