"""Installs the package `pipeline` of the distribution scale-cpt.

constraints.txt pins the versions that CI tests with.
"""

import re
import shutil
from pathlib import Path

from setuptools import find_packages, setup
from setuptools.command.build_py import build_py

VERSION = re.search(
    r'__version__ = "(.*)"', Path("pipeline/__init__.py").read_text(encoding="utf-8")
)[1]
# Files that lie beside the package in a checkout, and in pipeline/shipped in a wheel. The function
# `pipeline.installation.shipped` finds them. Texts that only studies and tests read are left out.
SHIPPED = ["configs", "ds_configs", "slurm"]
SHIPPED_DATA = ["README.md", "models/**/*", "en/stories*", "ko/reviews*"]


class BuildWithShippedFiles(build_py):
    """Also copies the shipped files, unless the installation is editable."""

    def run(self) -> None:
        super().run()
        if self.editable_mode:
            return
        target = Path(self.build_lib, "pipeline", "shipped")
        shutil.rmtree(target, ignore_errors=True)
        for folder in SHIPPED:
            shutil.copytree(folder, target / folder, ignore=shutil.ignore_patterns("__pycache__"))
        for pattern in SHIPPED_DATA:
            for file in filter(Path.is_file, Path("examples/data").glob(pattern)):
                (target / file.parent).mkdir(parents=True, exist_ok=True)
                shutil.copy(file, target / file)


# What one tool needs and training does not.
CLEAN = ["datatrove>=0.10,<0.11", "ftfy>=6.3,<7"]
FASTTEXT = ["fasttext-numpy2-wheel>=0.9.2,<1; python_version < '3.13'", "fasteners>=0.19,<1"]
REPORT = ["matplotlib>=3.9,<4"]  # figures of scale-cpt report, and of studies/ and benchmarks/
EVAL = ["lm-eval>=0.4.13,<0.5"]
GGUF = ["gguf>=0.10,<1"]
WANDB = ["wandb>=0.26,<1"]
# mlflow-skinny alone has no store: sqlalchemy and alembic are for runs in a local database.
MLFLOW = ["mlflow-skinny>=3.12,<4", "sqlalchemy>=2,<3", "alembic>=1.13,<2"]
# Fast kernels of hosted bases with recurrent layers (Qwen3-Next, Qwen3.5), on GPUs. causal-conv1d
# is built against the torch that is installed: pip install --no-build-isolation.
KERNELS = ["flash-linear-attention>=0.4", "causal-conv1d>=1.5"]
# Each reads the object stores of one maker, through fsspec.
S3 = ["s3fs>=2025.3"]
GS = ["gcsfs>=2025.3"]
AZ = ["adlfs>=2024.7"]

setup(
    name="scale-cpt",
    version=VERSION,
    description="Teach a language model a new language or domain by widening it, "
    "without making it forget (SCALE)",
    long_description=Path("README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    project_urls={"Paper": "https://aclanthology.org/2026.findings-acl.2037/"},
    packages=find_packages(include=["pipeline", "pipeline.*"]),
    package_data={
        "pipeline": ["py.typed"],
        "pipeline.extensions.cleaning": ["*.yaml"],
        "pipeline.extensions.report": ["templates/*"],
        "pipeline.extensions.gate": ["negatives.*"],
        "pipeline.extensions.hosted": ["base_types.md"],
    },
    cmdclass={"build_py": BuildWithShippedFiles},
    entry_points={"console_scripts": ["scale-cpt = pipeline.cli:main"]},
    python_requires=">=3.10",
    install_requires=[
        "torch>=2.13,<3",
        "deepspeed>=0.19.4,<0.20",
        "transformers>=5.4,<6",
        "datasets>=5,<6",  # from 5 on they take hf://datasets/…
        "huggingface_hub>=1,<3",
        "fsspec[http]>=2025.3",
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
        "charset-normalizer>=3",
        "gigatoken>=0.10,<0.11",
        "tqdm>=4.66",
        "jinja2>=3.1",
        "ninja>=1.11",
        "shtab>=1.7,<2",
    ],
    extras_require={
        "clean": CLEAN,
        "fasttext": FASTTEXT,
        "eval": EVAL,
        "report": REPORT,
        "gguf": GGUF,
        "wandb": WANDB,
        "mlflow": MLFLOW,
        "kernels": KERNELS,
        "s3": S3,
        "gs": GS,
        "az": AZ,
        "dev": [
            *CLEAN,
            *FASTTEXT,
            *EVAL,
            *REPORT,
            *GGUF,
            *WANDB,
            *MLFLOW,
            "mkdocs-material>=9.7,<10",
            "mkdocs-include-markdown-plugin>=7,<8",
            "mkdocstrings[python]>=1,<2",
            "codespell>=2.4,<3",
            "pytest>=8",
            "pytest-timeout>=2.3",
            "pytest-xdist>=3.6",
            "hypothesis>=6.100",
            "peft>=0.15",
            "trl>=1.16,<2",
            "optimum-quanto>=0.2.7,<0.3",
            "ruff>=0.9",
            "mypy>=1.13",
            "import-linter>=2.1",
            "pre-commit>=4",
            "types-PyYAML",
            "types-tqdm",
        ],
    },
)
