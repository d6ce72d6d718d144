"""Installs the package `pipeline` of the distribution scale-cpt; constraints.txt pins what CI tests with."""

from pathlib import Path

from setuptools import find_packages, setup

# What one tool needs and training does not.
EVAL = ["lm-eval>=0.4.13,<0.5"]
REPORT = ["resvg_py>=0.5,<1"]
SEARCH = ["optuna>=5,<6"]
WANDB = ["wandb>=0.26,<1"]
# The last two are for a local database.
MLFLOW = ["mlflow-skinny>=3.12,<4", "sqlalchemy>=2,<3", "alembic>=1.13,<2"]

setup(
    name="scale-cpt",
    version="0.1.0",
    description="Teach a language model a new language or domain by widening it, without making it forget (SCALE)",
    long_description=Path("README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    packages=find_packages(include=["pipeline", "pipeline.*"]),
    package_data={"pipeline": ["py.typed"], "pipeline.experiments.report": ["templates/*", "fonts/*"]},
    python_requires=">=3.10",
    install_requires=[
        "torch>=2.6,<3",
        "deepspeed>=0.19.4,<0.20",
        "transformers>=5.4,<6",
        "datasets>=3,<6",
        "tokenizers>=0.21",
        "sentencepiece>=0.2",
        "protobuf>=4",
        "safetensors>=0.5",
        "tensorboard>=2.15",
        "mpi4py>=4,<5",
        "numpy>=1.26",
        "pydantic>=2.7,<3",
        "pyyaml>=6",
        "orjson>=3.9",
        "pyarrow>=15",
        "zstandard>=0.22",
        "gigatoken>=0.10,<0.11",
        "tqdm>=4.66",
        "jinja2>=3.1",
        "ninja>=1.11",
    ],
    extras_require={
        "eval": EVAL,
        "report": REPORT,
        "search": SEARCH,
        "wandb": WANDB,
        "mlflow": MLFLOW,
        "dev": [
            *EVAL,
            *REPORT,
            *SEARCH,
            *WANDB,
            *MLFLOW,
            "gguf>=0.17,<1",
            "pytest>=8",
            "pytest-timeout>=2.3",
            "pytest-xdist>=3.6",
            "hypothesis>=6.100",
            "peft>=0.15",
            "ruff>=0.9",
            "mypy>=1.13",
            "import-linter>=2.1",
            "pre-commit>=4",
            "types-PyYAML",
            "types-tqdm",
        ],
    },
)
