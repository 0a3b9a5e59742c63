"""The vote of the nearest training images by an encoder's frozen features: python tools/knn.py checkpoint=PATH"""

from ssvit.cli.knn import main

if __name__ == "__main__":
    main()
