"""Pre-train a Vision Transformer: python tools/pretrain.py objective=masked_patch

Every option stands in configs/; give any as group=choice or group.option=value. The same command again goes on where
the run was stopped.
"""

from ssvit.cli.pretrain import main

if __name__ == "__main__":
    main()
