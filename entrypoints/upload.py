"""Put a model or an adapter on the hub, after it has generated, and see that what is there generates the same.

upload --input result/adapter --name you/open-calm-3b-lora --dry-run
HF_TOKEN=hf_... upload --input converted --name you/gpt-0.125B --prompt "Once upon a time,"
"""

from __future__ import annotations

import argparse
import os
import re
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ekiben_tasks.task import caches, command
from ekiben_tasks.task.adapter_folder import read_base
from ekiben_tasks.task.errors import SettingError, TaskError
from ekiben_tasks.task.hub import format_hub_error, format_upload_error, is_hub_model

# Of an earlier upload: loaders take model.safetensors before the shards of a model that has grown. Other files of the
# repository stay.
_WEIGHTS = [
    "model.safetensors",
    "model.safetensors.index.json",
    "model-*-of-*.safetensors",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
    "pytorch_model-*-of-*.bin",
    "adapter_model.bin",
]
_FOLDERS = ("converted", "merged", "result/model", "result/adapter")  # what other tasks write
_NAME = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*", re.ASCII)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command `upload` and return 0.

    arguments: the command line without the program's name; None: that of this process.

    Raises:
        SettingError: --name is not OWNER/NAME.
        TaskError: there is no model or no token, the model generates nothing, or the hub refuses it or has another one.
    """
    args = _parse(arguments)
    args.input = args.input or next((Path(each) for each in _FOLDERS if Path(each).is_dir()), Path(_FOLDERS[0]))
    if not _NAME.fullmatch(args.name):
        raise SettingError(f"--name {args.name}: write it as OWNER/NAME, for example you/gpt-0.125B")
    _check_folder(args.input)
    if outside := _leads_outside(args.input):
        raise TaskError(
            f"{outside}: is a link that points out of {args.input.absolute()}; what it points to would be uploaded."
            " Remove it"
        )
    token = os.environ.get("HF_TOKEN", "").strip()
    if not token and not args.dry_run:
        raise TaskError(
            "set HF_TOKEN to a token that may write (singularity: export HF_TOKEN=..., docker: -e HF_TOKEN)"
        )
    for line in caches.prepare_caches(os.environ):
        print(line, flush=True)

    before = generate(str(args.input), args.prompt)
    print(f"before      {args.prompt!r} continues: {before!r}", flush=True)
    paths = sorted(path.relative_to(args.input) for path in args.input.rglob("*") if path.is_file())
    files = [path for path in paths if not str(path).startswith(".")]
    size = sum((args.input / path).stat().st_size for path in files)
    where = f"{args.name} ({'private' if args.private else 'public'})"
    print(f"upload      {len(files)} files, {size / 1e6:,.1f} MB to {where}: {', '.join(map(str, files))}")
    if args.dry_run:
        print("dry run     nothing was sent", flush=True)
        return 0
    upload(args.input, args.name, str(token), private=args.private)
    with tempfile.TemporaryDirectory(prefix="ekiben-upload-") as folder:
        after = generate(_download(args.name, str(token), folder), args.prompt)
    print(f"after       {after!r}", flush=True)
    if after != before:
        raise TaskError(
            f"model {args.name}: the uploaded model generates another text than {args.input.absolute()}; look for"
            " files there that are not in that folder, remove them, and upload again"
        )
    print(f"done        {args.name}", flush=True)
    return 0


def generate(model_name: str, prompt: str) -> str:
    """Return what the model generates greedily after ``prompt``, at most 50 tokens. model_name: a folder, which may
    hold an adapter, or a hub id.

    Raises:
        TaskError: the model cannot be loaded, or generates nothing.
    """
    import torch
    import transformers

    if (Path(model_name) / "adapter_config.json").is_file():
        from ekiben_tasks.models.adapter import load_ready
        from ekiben_tasks.models.device import choose_device

        return _continue(*load_ready("", model_name, choose_device("cpu")), model_name, prompt)
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(model_name, trust_remote_code=False)
        model = transformers.AutoModelForCausalLM.from_pretrained(
            model_name, dtype=torch.float32, trust_remote_code=False
        )
    except Exception as error:
        raise TaskError(format_hub_error(error, model_name, "model")) from error
    return _continue(model, tokenizer, model_name, prompt)


def _continue(model: Any, tokenizer: Any, model_name: str, prompt: str) -> str:
    import torch

    ids = tokenizer(prompt, return_tensors="pt", add_special_tokens=False)["input_ids"]
    if not ids.numel():
        raise SettingError(f"--prompt {prompt!r}: has no tokens; give a text to continue")
    with torch.no_grad():
        longer = model.generate(input_ids=ids, max_new_tokens=50, do_sample=False, pad_token_id=tokenizer.eos_token_id)
    text = tokenizer.decode(longer[0, ids.shape[1] :], skip_special_tokens=True)
    if not text:
        raise TaskError(
            f"model {model_name}: generates nothing after {prompt!r}; is it trained? nothing is uploaded like this"
        )
    return str(text)


def _check_folder(folder: Path) -> None:
    """Raise TaskError for a folder without a model or adapter, and for an adapter whose base nobody else has."""
    if (folder / "config.json").is_file():
        return
    adapter = folder / "adapter_config.json"
    if not adapter.is_file():
        raise TaskError(
            f"{folder.absolute()}: no config.json there, and no adapter_config.json; name the folder of a model or an"
            " adapter with --input"
        )
    base = read_base(adapter)
    if not is_hub_model(base):
        raise TaskError(
            f"{adapter}: names the folder {base} as its base, which is on this machine alone; upload what `merge`"
            " writes, or train the adapter with the hub's name of the model"
        )


def _leads_outside(folder: Path) -> Path | None:
    """Return a file of ``folder`` that is a link to somewhere else, or None."""
    top = folder.resolve()
    return next((path for path in folder.rglob("*") if not path.resolve().is_relative_to(top)), None)


def upload(folder: Path, name: str, token: str, *, private: bool) -> None:
    """Upload the model in ``folder`` as ``name``, OWNER/NAME, into a repository that is created where there is none.

    Weights of an earlier upload are removed in the same commit.

    Raises:
        TaskError: the hub refuses it or cannot be reached.
    """
    import huggingface_hub

    api = huggingface_hub.HfApi(token=token)
    try:
        api.create_repo(name, private=private, exist_ok=True)
        api.upload_folder(
            repo_id=name,
            folder_path=folder,
            ignore_patterns=[".*"],
            delete_patterns=_WEIGHTS,
            commit_message="Upload by ekiben",
        )
    except Exception as error:
        raise TaskError(format_upload_error(error, name)) from error


def _download(name: str, token: str, folder: str) -> str:
    """Download the model into a new folder: cached files would prove nothing."""
    import huggingface_hub

    try:
        return str(huggingface_hub.snapshot_download(name, token=token, local_dir=folder))
    except Exception as error:
        raise TaskError(format_hub_error(error, name, "model")) from error


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="upload", description=(__doc__ or "").strip(), formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--input", type=Path, metavar="DIR", help=f"default: the first of {', '.join(_FOLDERS)}")
    parser.add_argument("--name", required=True, metavar="OWNER/NAME", help="of the model on the hub")
    parser.add_argument("--prompt", default="Once upon a time,", metavar="TEXT", help="the text to continue")
    parser.add_argument("--private", action="store_true", help="make the repository private")
    parser.add_argument("--dry-run", action="store_true", help="generate and list the files; do not upload")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    command.run(main)
