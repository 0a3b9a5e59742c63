from ssvit.cli.export import main

if __name__ == "__main__":
    main()
