from ssvit.cli.retrieve import main

if __name__ == "__main__":
    main()
