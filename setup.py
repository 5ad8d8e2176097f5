from setuptools import find_packages, setup

setup(
    name="pkm",
    version="0.1.0",
    description="Train language models with product-key memories from one YAML file",
    license="MIT",
    python_requires=">=3.11",
    packages=find_packages(include=["pkm", "pkm.*"]),
    package_data={"pkm": ["**/*.txt", "**/*.json", "**/*.html", "**/*.css"]},
    install_requires=[
        "torch>=2.11",
        "numpy",
        "pyyaml",
        "pydantic>=2.11",
        "rich",
        "safetensors",
        "tensorboard",
        "tokenizers",
        "zstandard",
    ],
    extras_require={
        "test": ["pytest", "hypothesis", "ruff", "mypy", "types-PyYAML", "sacremoses"],
    },
)
