from ssvit.cli.evaluate import few_shot

if __name__ == "__main__":
    few_shot.main()
