"""Turn what a pre-training run left into a classifier: python tools/finetune.py

Takes the newest finished run under outputs/ and its images, unless checkpoint= and data= name others. The same command
again goes on where the run was stopped.
"""

from ssvit.cli.finetune import main

if __name__ == "__main__":
    main()
