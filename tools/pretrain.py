from ssvit.cli.pretrain import main

if __name__ == "__main__":
    main()
