"""Write a pretrained model and its tokenizer as Hugging Face's libraries read them, after comparing the logits.

convert --input pretrained --output converted
convert --input pretrained --step 1000 --output converted-1000
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ekiben_tasks.task import caches, command, files, input_files, model_card
from ekiben_tasks.task import settings as options
from ekiben_tasks.task.errors import TaskError
from ekiben_tasks.task.settings import option
from megatron_warnings import silence_warnings

if TYPE_CHECKING:
    from model_configs import Shape

TOLERANCE = 1e-4  # tolerance of logits in fp32, relative to the largest: the order of additions differs
_DTYPES = ("float32", "float16", "bfloat16")
_TRIALS = (
    "富士山は日本で一番高い山です。",
    "Once upon a time,\n  there were 123 dwarves.",
    "  𠮷野家で😀\n\nﾗｰﾒﾝ１杯 ",
)


@dataclass(frozen=True)
class Settings:
    """Define the settings of `convert`."""

    dtype: Literal["auto", "float32", "float16", "bfloat16"] = option("auto", "type to store; auto: as it was trained")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command `convert` and return 0.

    arguments: the command line without the program's name; None: that of this process.

    Raises:
        SettingError: a setting is wrong.
        TaskError: there is no checkpoint, the output is not empty, or the converted model or tokenizer differs.
    """
    args = _parse(arguments)
    settings = options.load(Settings, args.config, args.set)
    checkpoint = find_checkpoint(args.input, args.step)
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # only fp32 on the CPU can be compared this precisely
    output = files.ensure_output_dir(args.output, empty=True)
    for line in caches.prepare_caches(os.environ):
        print(line, flush=True)
    print(f"converting  {checkpoint}", flush=True)
    difference = convert(args.input, checkpoint, output, dtype=settings.dtype)
    model_card.carry_training(args.input, output)
    print(f"done        {output}: written, read again, logits differ by {difference:.1e} of the largest", flush=True)
    print(f"try         upload --input {output} --name you/your-model --dry-run", flush=True)
    return 0


def convert(run: Path, checkpoint: Path, output: Path, *, dtype: str = "auto") -> float:
    """Write the model to ``output``, read it back, and return the largest difference in logits.

    run: the folder that pretrain wrote. dtype: of the stored weights; auto: as trained. Call it in a process that sees
    no GPU. The difference is a share of the largest logit, computed in fp32.

    Raises:
        TaskError: the model or tokenizer cannot be read, or differs when converted; nothing is left in ``output``.
    """
    import without_gpu

    silence_warnings()
    without_gpu.pretend()
    import torch
    import transformers

    import pieces
    from model_configs import hugging_face_config

    sizes, name = _read_record(checkpoint / "about.json")
    model_dtype = getattr(torch, name)
    processor = pieces.load(run)
    tokenizer = pieces.to_hugging_face(run / pieces.MODEL)
    check_tokenizer(processor, tokenizer)

    ids = torch.arange(100, 100 + min(64, sizes.positions))[None] % sizes.vocabulary
    with load_megatron(checkpoint, sizes, model_dtype) as model, torch.no_grad():
        before = model.float()(ids, torch.arange(ids.shape[1])[None], None)
        weights = rename_weights(model.state_dict(), sizes)
    config = hugging_face_config(sizes, end=tokenizer.eos_token_id, begin=tokenizer.bos_token_id)
    ours = transformers.GPT2LMHeadModel(config)
    missing, unexpected = ours.load_state_dict(weights, strict=False)
    if unexpected or set(missing) - {"lm_head.weight"}:
        raise TaskError(
            f"{checkpoint}: weights {[*missing, *unexpected][:5]} have no counterpart; was it made by pretrain?"
        )
    ours.tie_weights()
    try:
        difference = compare(before, ours, ids)
        stored = model_dtype if dtype == "auto" else getattr(torch, dtype)
        ours.to(stored).save_pretrained(output)
        tokenizer.model_max_length = sizes.positions
        tokenizer.save_pretrained(output)
        again = transformers.AutoModelForCausalLM.from_pretrained(output, dtype=torch.float32)
        rounded = {torch.float32: TOLERANCE, torch.float16: 1e-2, torch.bfloat16: 5e-2}[stored]
        compare(before, again, ids, rounded if stored != model_dtype else TOLERANCE)
        check_tokenizer(processor, transformers.AutoTokenizer.from_pretrained(output))
    except BaseException:
        for file in output.iterdir():
            file.unlink()
        raise
    return difference


def find_checkpoint(run: Path, step: int | None) -> Path:
    """The newest checkpoint of ``run``, or that of ``step``. Raises TaskError."""
    complete = (path for path in (run / "checkpoints").glob("step-*") if (path / "about.json").is_file())
    numbers = {int(path.name.removeprefix("step-")): path for path in complete}
    if not numbers:
        raise TaskError(f"{run.absolute()}: holds no checkpoint; pretrain --output writes such a folder")
    if step is not None and step not in numbers:
        raise TaskError(f"{run}: no checkpoint of step {step}; there is {', '.join(map(str, sorted(numbers)))}")
    return numbers[max(numbers) if step is None else step]


@contextlib.contextmanager
def load_megatron(checkpoint: Path, shape: Shape, dtype: Any) -> Iterator[Any]:
    """Yield the complete model on the CPU, however many GPUs wrote it.

    Raises:
        TaskError: the checkpoint cannot be read.
    """
    import torch
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    try:
        model_parallel_cuda_manual_seed(0)
        yield _load(checkpoint, shape, dtype)
    finally:
        parallel_state.destroy_model_parallel()
        torch.distributed.destroy_process_group()


def _load(checkpoint: Path, sizes: Shape, dtype: Any) -> Any:
    from megatron.core import dist_checkpointing

    import gpt
    import sharded_state
    from ekiben_tasks.models.checkpoint_folder import SHARDS

    config = gpt.configure(sizes, gpt.ModelOptions(dtype=dtype))
    # Megatron builds norms and positions in fp32, and casts them for training: round them in the same way.
    model = gpt.build(sizes, config, seed=0).to(dtype)
    try:
        if (checkpoint / SHARDS).is_dir():
            sharded_state.read(model, None, checkpoint / SHARDS, 0)
        else:  # of a release that wrote Megatron's own format
            state = dist_checkpointing.load({"model": model.sharded_state_dict()}, str(checkpoint))
            model.load_state_dict(state["model"])
    except TaskError:
        raise
    except Exception as error:
        raise TaskError(f"{checkpoint}: cannot be read: {' '.join(str(error).split())[:300]}") from error
    return model.eval()


def rename_weights(state: dict[str, Any], shape: Shape) -> dict[str, Any]:
    """Return Megatron's weights under the names, and in the order, of GPT-2's in transformers.

    Weights of linear layers are transposed, because GPT-2's are those of Conv1D: ``[in, out]``.
    """
    import torch

    plain = {
        "embedding.word_embeddings.weight": "wte.weight",
        "embedding.position_embeddings.weight": "wpe.weight",
        "decoder.final_layernorm.weight": "ln_f.weight",
        "decoder.final_layernorm.bias": "ln_f.bias",
    }
    modules = {
        "input_layernorm": "ln_1",
        "self_attention.linear_qkv": "attn.c_attn",
        "self_attention.linear_proj": "attn.c_proj",
        "pre_mlp_layernorm": "ln_2",
        "mlp.linear_fc1": "mlp.c_fc",
        "mlp.linear_fc2": "mlp.c_proj",
    }
    renamed = {}
    for name, weight in state.items():
        if not isinstance(weight, torch.Tensor) or name.endswith("_extra_state") or name == "output_layer.weight":
            continue
        if match := re.fullmatch(r"decoder\.layers\.(\d+)\.(.+)\.(weight|bias)", name):
            layer, module, kind = match.groups()
            if module.endswith("linear_qkv"):
                # Megatron: head by head, its query, key and value; GPT-2: all queries, all keys, all values.
                weight = weight.unflatten(0, (shape.heads, 3, -1)).transpose(0, 1).flatten(0, 2)
            weight = weight.T if weight.dim() == 2 else weight
            renamed[f"transformer.h.{layer}.{modules.get(module, module)}.{kind}"] = weight.contiguous()
        else:
            renamed[f"transformer.{plain.get(name, name)}"] = weight
    return renamed


def compare(before: Any, model: Any, ids: Any, tolerance: float = TOLERANCE) -> float:
    """Return the largest difference in logits, as a share of the largest logit.

    before: logits ``[1, tokens, vocabulary]``, fp32. ids: ``[1, tokens]``.

    Raises:
        TaskError: it is not below ``tolerance``.
    """
    import torch

    with torch.no_grad():
        after = model.float().eval()(input_ids=ids).logits
    difference = float((before - after).abs().max() / before.abs().max())
    if not difference < tolerance:
        raise TaskError(f"the converted model's logits differ by {difference:.1e} of the largest; nothing was written")
    return difference


def check_tokenizer(trained: Any, converted: Any) -> None:
    """Check that both tokenizers encode and decode sample texts equally.

    Raises:
        TaskError: they do not.
    """
    for text in _TRIALS:
        ids = trained.encode(text)
        if converted.encode(text, add_special_tokens=False) != ids or converted.decode(ids) != trained.decode(ids):
            raise TaskError(f"the converted tokenizer makes other tokens of {text!r}; nothing was written")


def _read_record(file: Path) -> tuple[Shape, str]:
    """Return the sizes of a checkpoint's model, and its dtype by torch's name.

    Raises TaskError when the file does not tell.
    """
    import model_configs

    content = input_files.read_object(file, "take another checkpoint: --step N")
    try:
        sizes = model_configs.Shape(**content["shape"])
        dtype = str(content["fingerprint"]["dtype"]).removeprefix("torch.")
        if any(type(size) is not int or size < 1 for size in asdict(sizes).values()):
            raise ValueError(f"its sizes are not all positive integers: {asdict(sizes)}")
        if dtype not in _DTYPES:
            raise ValueError(f"its dtype is '{dtype}', not {', '.join(_DTYPES)}")
    except ValueError as error:
        raise TaskError(f"{file}: {error}; use another checkpoint: --step N") from error
    except (KeyError, TypeError) as error:
        raise TaskError(f"{file}: has no sizes or dtype that pretrain writes: {error}") from error
    return sizes, dtype


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = command.command("convert", __doc__, Settings, arguments)
    parser.add_argument(
        "--input", type=Path, metavar="DIR", default=Path("pretrained"), help="output folder of pretrain"
    )
    parser.add_argument("--step", type=int, metavar="N", help="the checkpoint of that step; default: the newest")
    parser.add_argument("--output", type=Path, metavar="DIR", default=Path("converted"), help="an empty or new folder")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    command.run(main)
