"""Runs llama.cpp's converter with the pre-tokenizer that its list of known tokenizers lacks: GPT-2's byte-level BPE.

python convert_gguf.py SOURCE_FOLDER [arguments of convert_hf_to_gguf.py]
"""

import runpy
import sys
from pathlib import Path


def main() -> None:
    source = Path(sys.argv[1])
    sys.path[:0] = [str(source), str(source / "gguf-py")]
    from conversion.base import TextModel  # type: ignore[import-not-found]

    TextModel.get_vocab_base_pre = lambda _self, _tokenizer: "gpt-2"
    sys.argv = ["convert_hf_to_gguf.py", *sys.argv[2:]]
    runpy.run_path(str(source / "convert_hf_to_gguf.py"), run_name="__main__")


if __name__ == "__main__":
    main()
