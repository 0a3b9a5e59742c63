from ssvit.cli.finetune import tool

if __name__ == "__main__":
    tool.main()
