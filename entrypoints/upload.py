"""Put a model or an adapter on the hub with its card, after it has generated, and see that it generates the same there.

upload --input result/adapter --name you/open-calm-3b-lora --dry-run
upload --input result/adapter --name you/lora --evaluation evaluation --evaluation scores/jsquad --license cc-by-sa-4.0
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

from ekiben_tasks.task import caches, command, input_files, model_card
from ekiben_tasks.task.adapter_folder import read_base
from ekiben_tasks.task.errors import SettingError, TaskError
from ekiben_tasks.task.hub import format_hub_error, format_upload_error, is_hub_model, split_revision

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
_LICENCE = re.compile(r"[a-z0-9.-]{1,40}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command `upload` and return 0.

    arguments: the command line without the program's name; None: that of this process.

    Raises:
        SettingError: --name is not OWNER/NAME, or --license no identifier.
        TaskError: there is no model or no token, the model generates nothing, or the hub refuses it or has another one.
    """
    args = _parse(arguments)
    args.input = args.input or next((Path(each) for each in _FOLDERS if Path(each).is_dir()), Path(_FOLDERS[0]))
    if not _NAME.fullmatch(args.name):
        raise SettingError(f"--name {args.name}: write it as OWNER/NAME, for example you/gpt-0.125B")
    if args.license and not _LICENCE.fullmatch(args.license):
        raise SettingError(f"--license {args.license}: write the hub's identifier, for example apache-2.0")
    _check_folder(args.input)
    evaluations = [model_card.read_evaluation(path) for path in args.evaluation] or _default_evaluation(args.input)
    training = model_card.find_training(args.input)
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
    base = _base_of(args.input, training)
    licence = args.license or _licence_of(base)
    card = model_card.Card(
        name=args.name,
        base=split_revision(base)[0] if base else "",
        is_adapter=(args.input / "adapter_config.json").is_file(),
        licence=licence,
        training=training,
        evaluations=evaluations,
    )
    _write_card(args.input, card, is_dry=args.dry_run)
    paths = sorted(path.relative_to(args.input) for path in args.input.rglob("*") if path.is_file())
    files = [path for path in paths if not str(path).startswith(".")]
    size = sum((args.input / path).stat().st_size for path in files)
    where = f"{args.name} ({'private' if args.private else 'public'})"
    print(f"upload      {len(files)} files, {size / 1e6:,.1f} MB to {where}: {', '.join(map(str, files))}")
    if args.dry_run:
        print("dry run     nothing was sent", flush=True)
        return 0
    upload(args.input, args.name, str(token), private=args.private, replace_card=args.replace_card)
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
        model, report = transformers.AutoModelForCausalLM.from_pretrained(
            model_name, dtype=torch.float32, trust_remote_code=False, output_loading_info=True
        )
    except Exception as error:
        raise TaskError(format_hub_error(error, model_name, "model")) from error
    if missing := sorted(report["missing_keys"]):  # transformers fills them with random numbers
        raise TaskError(f"model {model_name}: its files lack the weights {', '.join(missing[:3])}; write it again")
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
    """Raise TaskError for a folder without a model that generates, and for an adapter whose base nobody else has."""
    config = folder / "config.json"
    is_classifier = (folder / "labels.json").is_file()  # beside an adapter
    if config.is_file():
        names = input_files.read_object(config, "train or merge again").get("architectures")
        is_classifier = isinstance(names, list) and any(str(n).endswith("ForSequenceClassification") for n in names)
    if is_classifier:
        raise TaskError(
            f"{folder.absolute()}: is a classifier, and this task uploads what generates text; `hf upload` takes it"
        )
    if config.is_file():
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


def _default_evaluation(folder: Path) -> list[dict[str, Any]]:
    """Return the evaluation in ./evaluation, where the tasks write it, if it is of the model in ``folder``."""
    if not Path("evaluation/run.json").is_file():
        return []
    record = model_card.read_evaluation(Path("evaluation"))
    return [record] if model_card.is_of(record, folder) else []


def _base_of(folder: Path, training: dict[str, Any] | None) -> str:
    """Return the hub's name of the model that was trained, with its revision; empty where it was another folder."""
    adapter = folder / "adapter_config.json"
    model = (training or {}).get("model")
    name = model.get("name", "") if isinstance(model, dict) else ""
    if adapter.is_file():
        name = name if name.partition("@")[0] == read_base(adapter).partition("@")[0] else read_base(adapter)
    repository, _ = split_revision(name) if isinstance(name, str) else ("", None)
    is_folder = Path(repository).expanduser().exists()
    return name if _NAME.fullmatch(repository) and not is_folder else ""


def _licence_of(base: str) -> str:
    """Return the licence that the card of model ``base`` on the hub names; empty where it names none or is not read."""
    import huggingface_hub

    if not base:
        return ""
    repository, revision = split_revision(base)
    try:
        file = huggingface_hub.hf_hub_download(repository, model_card.CARD, revision=revision)
        return model_card.read_licence(input_files.read_text(Path(file), "it is not used"))
    except Exception:  # it has no card, or the hub cannot be reached: the upload says so
        return ""


def _write_card(folder: Path, card: model_card.Card, *, is_dry: bool) -> None:
    """Write the card into ``folder``, where it is not the user's, and print what happened."""
    file = folder / model_card.CARD
    if not card.licence:
        print("note        the licence is not known: --license names it, for example apache-2.0", flush=True)
    if is_dry:
        text = file.exists() and input_files.read_text(file, "remove it")
        kept = bool(text) and not model_card.is_generated(str(text))
        print(f"card        {file}: yours, stays as it is" if kept else card.text(), flush=True)
    elif model_card.write(folder, card):
        evaluations = f", {len(card.evaluations)} evaluations" if card.evaluations else ""
        print(f"card        {file}: written{'' if card.training else ', without a training record'}{evaluations}")
    else:
        print(f"card        {file}: yours, stays as it is; remove it, and a new one is written", flush=True)


def upload(folder: Path, name: str, token: str, *, private: bool, replace_card: bool = False) -> None:
    """Upload the model in ``folder`` as ``name``, OWNER/NAME, into a repository that is created where there is none.

    Weights of an earlier upload are removed in the same commit. replace_card: also a card there that a user wrote.

    Raises:
        TaskError: the hub refuses it or cannot be reached.
    """
    import huggingface_hub

    api = huggingface_hub.HfApi(token=token)
    try:
        api.create_repo(name, private=private, exist_ok=True)
        ignored = [".*"]
        if not replace_card and _has_other_card(name, token, folder):
            print(f"card        that of {name} was not written here, and stays; --replace-card replaces it", flush=True)
            ignored.append(model_card.CARD)
        api.upload_folder(
            repo_id=name,
            folder_path=folder,
            ignore_patterns=ignored,
            delete_patterns=_WEIGHTS,
            commit_message="Upload by ekiben",
        )
    except Exception as error:
        raise TaskError(format_upload_error(error, name)) from error


def _has_other_card(name: str, token: str, folder: Path) -> bool:
    """Return whether the hub has a card of the model that a user wrote or edited, and that is not the local one."""
    import huggingface_hub
    from huggingface_hub.errors import EntryNotFoundError

    with tempfile.TemporaryDirectory(prefix="ekiben-card-") as scratch:
        try:
            file = huggingface_hub.hf_hub_download(name, model_card.CARD, token=token, local_dir=scratch)
        except EntryNotFoundError:
            return False
        text, local = input_files.read_text(Path(file), "it stays"), folder / model_card.CARD
        return not model_card.is_generated(text) and not (
            local.is_file() and input_files.read_text(local, "remove it") == text
        )


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
    parser.add_argument(
        "--evaluation",
        type=Path,
        action="append",
        default=[],
        metavar="DIR",
        help="output of evaluate, jsquad or perplexity, for the card; repeatable (default: evaluation, if it is of"
        " this model)",
    )
    parser.add_argument("--license", metavar="ID", help="as the hub names it, for the card (default: the base's)")
    parser.add_argument(
        "--replace-card", action="store_true", help="replace the README.md on the hub, even if a user wrote it"
    )
    parser.add_argument("--private", action="store_true", help="make the repository private")
    parser.add_argument("--dry-run", action="store_true", help="generate and list the files; do not upload")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    command.run(main)
