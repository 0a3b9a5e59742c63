from ssvit.cli.benchmark import tool

if __name__ == "__main__":
    tool.main()
