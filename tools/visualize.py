from ssvit.cli.visualize import main

if __name__ == "__main__":
    main()
