"""Shows what a token corpus holds, checks its shards against the manifest, and turns some documents back into text.

python tools/inspect_data.py runs/demo/tokens/korean --tokenizer data/models/stories260K
"""

from __future__ import annotations

import argparse
from pathlib import Path

from pipeline.command_line import run
from pipeline.data.corpora import decoded_documents, summary
from pipeline.data.preprocess import QUARANTINE
from pipeline.data.token_corpus import TokenCorpus
from pipeline.data.tokenizer import load_tokenizer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("corpus", type=Path, help="the folder that tools/preprocess_data.py wrote")
    parser.add_argument(
        "--tokenizer", type=Path, help="decode samples with this tokenizer, the one that made the corpus"
    )
    parser.add_argument("--samples", type=int, default=3, help="how many documents to decode (default: 3)")
    parser.add_argument("--characters", type=int, default=400, help="of each, show so many characters (default: 400)")
    parser.add_argument("--seed", type=int, default=0, help="which documents (default: 0)")
    options = parser.parse_args()

    corpus = TokenCorpus(options.corpus)
    for name, value in summary(corpus.manifest):
        print(f"{name:18} {value}")
    corpus.check()
    print(f"{'shards':18} all there, as large as the manifest says")
    if (options.corpus / QUARANTINE).exists():
        print(f"{'rejected records':18} {options.corpus / QUARANTINE}")
    if options.tokenizer:
        tokenizer = load_tokenizer(options.tokenizer)
        for where, text in decoded_documents(corpus, tokenizer, options.samples, options.seed):
            print(f"\n--- {where} ---\n{text[: options.characters]}{'…' if len(text) > options.characters else ''}")


if __name__ == "__main__":
    run(main)
