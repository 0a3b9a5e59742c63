"""Least squares on a few images of each class, by frozen features: python tools/few_shot.py checkpoint=PATH"""

from ssvit.cli.few_shot import main

if __name__ == "__main__":
    main()
