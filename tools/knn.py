from ssvit.cli.evaluate import main

if __name__ == "__main__":
    main("knn")
