from ssvit.cli.pretrain import tool

if __name__ == "__main__":
    tool.main()
