"""Answer a JSONL file of requests as OpenAI's batches have them, without a server; a killed run continues.

batch --model cyberagent/open-calm-3b --input requests.jsonl --output answers.jsonl
batch --adapter mine=result/adapter      requests name the model or `mine`
batch --dry-run                          the requests are checked; no model is loaded
batch --smoke                            offline, in seconds, with or without a GPU
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import serve_lines
import serve_settings
from ekiben_tasks.task import command
from serve_settings import BatchSettings


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command `batch` and return its exit code: 0, or 75 or 130 after a signal.

    arguments: the command line without the program's name; None: that of this process.

    Raises:
        SettingError: an option or a setting is wrong.
        TaskError: a request, the model, an adapter or the output cannot be used.
    """
    parser = command.command("batch", __doc__, BatchSettings, arguments)
    parser.add_argument("--input", metavar="FILE", help="instead of the setting input")
    parser.add_argument("--overwrite", action="store_true", help="start again, though --output holds answers")
    settings, args = serve_settings.read(BatchSettings, parser, arguments)
    sample = command.recipe_folder(args.config, __file__) / "data" / "sample-requests.jsonl"
    if args.smoke:
        import serve_smoke_test

        return serve_smoke_test.smoke_batch(settings, sample)
    models = serve_settings.find_models(settings)
    file = sample if settings.input == "sample" else Path(settings.input)
    lines = serve_lines.read_requests(file, list(models))
    if args.dry_run:
        counts = Counter(line.request.model for line in lines)
        print(f"would answer {', '.join(f'{count:,} by {name} ({models[name]})' for name, count in counts.items())}")
        return 0
    return serve_lines.answer_file(settings, models, lines, overwrite=args.overwrite)


if __name__ == "__main__":
    command.run(main)
