from ssvit.cli.finetune import main

if __name__ == "__main__":
    main()
