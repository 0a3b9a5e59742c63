"""Write a checkpoint as others open it: python tools/export.py format=onnx|torch_export|safetensors|timm|huggingface"""

from ssvit.cli.export import main

if __name__ == "__main__":
    main()
