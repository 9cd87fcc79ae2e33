"""Speed of answering: rows in batches against one by one, the same model, rows and sampling, in one run.

    python3 qa/gpu/bench_generate.py                          OpenCALM-3B's shape, 128 rows, batches of 1, 8 and 32
    python3 qa/gpu/bench_generate.py --device cpu --layers 4 --width 256 --heads 4 --vocabulary 4000

Weights are random and nothing ends an answer early, so every row gets all its new tokens. The first batch of each size
is left out: it pays for what libraries set up. At the end: how many greedy answers are the same in a batch as one by
one (in bf16 sums come out a little differently in another shape, and random weights leave the likeliest token little
ahead; in fp32 they should be the same).
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT / "entrypoints"))

import torch
import transformers

from ekiben_tasks.generation.batch import Prompt, make_batches
from ekiben_tasks.generation.sampling import Sampling, sample
from ekiben_tasks.models import tiny


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--width", type=int, default=2560)
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--vocabulary", type=int, default=52_224)
    parser.add_argument("--rows", type=int, default=128)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--device", default="cuda")
    args = parser.parse_args()
    tokenizer = tiny.learn_tokenizer(["speed"], 300)
    dtype = torch.bfloat16 if args.device == "cuda" else torch.float32
    config = transformers.GPTNeoXConfig(
        vocab_size=args.vocabulary,
        hidden_size=args.width,
        num_hidden_layers=args.layers,
        num_attention_heads=args.heads,
        intermediate_size=4 * args.width,
        max_position_embeddings=2048,
    )
    torch.manual_seed(0)
    with torch.device(args.device):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa").eval()
    with torch.no_grad():
        model.lm_head.weight[tokenizer.eos_token_id] = 0  # its logit stays 0, and some other's is above
    chance = random.Random(0)
    rows = [
        Prompt(n, [chance.randrange(300, args.vocabulary) for _ in range(chance.randrange(40, 400))], args.new_tokens)
        for n in range(args.rows)
    ]
    how = Sampling(temperature=0.7, top_p=0.9, repetition_penalty=1.05, seed=0)
    speeds = {}
    for size in args.batches:
        # One by one takes long, and each row costs about the same: a quarter of the rows will do.
        batches = make_batches(rows if size > 1 else rows[:: max(len(rows) // 32, 1)], size)
        answer(model, tokenizer, batches[0], how)
        started, tokens = time.monotonic(), 0
        for batch in batches[1:] or batches:
            tokens += answer(model, tokenizer, batch, how)
        speeds[size] = tokens / (time.monotonic() - started)
        ratio = speeds[size] / speeds[args.batches[0]]
        print(f"batch {size:>3}: {speeds[size]:>9,.0f} tokens/s  {ratio:5.1f} x batch {args.batches[0]}", flush=True)
    greedy, few = Sampling(), sorted(rows, key=lambda row: len(row.ids))[:16]
    for number in dict.fromkeys((dtype, torch.float32)):
        model.to(number)
        together = texts(model, tokenizer, few, greedy)
        alone = [texts(model, tokenizer, [row], greedy)[0] for row in few]
        same = sum(a == b for a, b in zip(together, alone, strict=True))
        print(f"greedy: {same} of {len(few)} answers in a batch are those of one by one, in {number}", flush=True)
    return 0


def texts(model: object, tokenizer: object, batch: list[Prompt], params: Sampling) -> list[list[int]]:
    found = sample(
        model, tokenizer, [row.ids for row in batch], [row.index for row in batch], batch[0].max_new_tokens, params
    )
    return [ids for ids, _ in found]


def answer(model: object, tokenizer: object, batch: list[Prompt], params: Sampling) -> int:
    found = texts(model, tokenizer, batch, params)
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return sum(map(len, found))


if __name__ == "__main__":
    raise SystemExit(main())
