"""The model card of the demo pair, written from its metrics: what it was made from, how, and how good it is."""

from pathlib import Path

TEMPLATE = """# Demo pair

A target and a draft that were really trained, small enough to ship: Llama architecture, Hugging Face
layout, fp16, one byte-level BPE tokenizer of 2048 tokens (the same file in both folders; id 0 is
`<|endoftext|>`, which stands before every file of the corpus and ends a text). Context: {context} tokens.
They continue Python source in the manner of the standard library and mean little; they are here to be
real distributions with a real acceptance rate.

| | layers | hidden | MLP | heads | parameters | fp16 bytes | FLOPs per token |
|---|---|---|---|---|---|---|---|
| target | 6 | 256 | 704 | 4 | {target_params:,} | {target_bytes:,} | {target_flops:.2f} M |
| draft | 2 | 128 | 352 | 2 | {draft_params:,} | {draft_bytes:,} | {draft_flops:.2f} M |

The draft costs 1/{cost_ratio:.1f} of the target per token (matrix products with the head, without attention scores).

## How good

Measured on held-out files only, weights rounded to fp16 as shipped, arithmetic in fp32 ([metrics.json](metrics.json)).

| on the text of the {held_out_files} held-out files, {num_places:,} places | target | draft |
|---|---|---|
| bits per byte | {target_bpb:.3f} | {draft_bpb:.3f} |
| bits per byte, second half of the {context}-token windows | {target_bpb_second:.3f} | {draft_bpb_second:.3f} |
| greedy agreement of the two | {agreement:.1%} | |
| 1 - TV of the two (chance of acceptance at temperature 1) | {overlap:.1%} | |

| on the target's own continuations of held-out prompts, before loops | temperature 0.8 | greedy |
|---|---|---|
| greedy agreement | {warm[greedy_agreement]:.1%} | {greedy[greedy_agreement]:.1%} |
| chance of acceptance | {warm[acceptance]:.1%} | {greedy[acceptance]:.1%} |
| the same with loops | {warm[acceptance_with_loops]:.1%} | {greedy[acceptance_with_loops]:.1%} |
| tokens per step at 5 draft tokens | {warm[emitted_per_step_5_draft_tokens]:.2f} | \
{greedy[emitted_per_step_5_draft_tokens]:.2f} |
| texts that loop within 192 tokens | {warm[loops_share]:.0%} | {greedy[loops_share]:.0%} |

Prompts there are the last 64 tokens of each line of `prompts.jsonl`. A loop is an end of the text, 48 tokens
or longer, that repeats with one period.

## How it was made

`python scripts/train_demo_pair.py` (Python {python}, torch {torch}, seed {seed}), on one core of a 2-core x86-64
machine that others shared; the minutes are wall-clock. Plans count steps, so a second run reads the same batches;
other machines or libraries round differently and end near these figures, not on them.

- **Data**: the `*.py` files of the standard library of Python {python}, without tables (`encodings`, `pydoc_data`),
  duplicates and mostly non-ASCII files. A file is held out when the SHA-1 of its relative path is 0 modulo 25:
  {train_files} files / {train_mb:.1f} MB / {train_tokens:.2f} M tokens to train, {held_out_files} files /
  {held_out_mb:.2f} MB held out. SHA-256 of the listing (`sha1(text) path` per line, by path):
  `{listing}`. The tokenizer was trained on the training files.
- **Target**: cross-entropy, {t[num_steps]} steps of {t[tokens_per_step]} tokens ({t_epochs:.2f} epochs) at 512 tokens
  of context, the last {t[num_long_steps]} steps at 1024. Muon (rate {t[muon_lr]}) for the matrices, AdamW
  ({t[adam_lr]}) for embedding and norms, constant, then linear over the second half of a plan of
  {t[decay_steps]} steps, and faster to zero over the last 250 of those taken; bfloat16 autocast.
  {t_minutes:.0f} minutes, last training loss {t_loss:.3f} nats per token; held-out {t_nats:.3f}.
- **Draft**: {w[num_steps]} steps of {w[tokens_per_step]} tokens of cross-entropy, then {d[num_steps]} and
  {r[num_steps]} steps of {d[tokens_per_step]} tokens of imitation: KL(target || draft) over the target's 64 likeliest
  tokens and the rest as one, with total variation added (times {d[tv_weight]} for the last {d_tv_share:.0%} of the
  first part, times {r[tv_weight]} for the last {r_tv_share:.0%} of the second). Muon at {d[muon_lr]}, then
  {r[muon_lr]}, AdamW at {d[adam_lr]}. It read {sample_tokens:.2f} M tokens of the target's own samples (512 long from
  corpus prefixes: half at temperature 1, 3/10 at 0.7, 1/5 greedy) and {text_tokens:.2f} M tokens of corpus text,
  {d_epochs:.0f} times. {w_minutes:.0f} + {d_minutes:.0f} + {r_minutes:.0f} minutes, last KL {r_kl:.3f}, TV {r_tv:.3f};
  sampling and annotation took about 6 minutes more.

## Prompts

`prompts.jsonl`: {num_prompts} prompts of 64 to 200 tokens from held-out files, at most 3 per file, as lines
`{{"id", "source", "prompt", "num_tokens", "ends_after"}}`. Each is file context and a function's head; it ends after
the docstring or, for undocumented functions, after the signature, with the newline.

## Limits

- {train_mb:.0f} MB of text, read {t_epochs:.1f} times, make a model of Python's look, not of its sense; the loss was
  still falling, so more `--target-steps` make a better target (and one that is harder to imitate).
- Greedy decoding soon loops, and loops are easy to draft: report acceptance before loops, or sample at about 0.8.
- Always set a largest number of tokens; an end-of-text token is rare within a file.
- Positions beyond {context} were never trained.

## Licence

The weights were learned from, and the prompts are quoted from, the Python standard library: Copyright Python Software
Foundation, under the [PSF License Agreement](https://docs.python.org/3/license.html); some modules carry notices of
their own. The training code is the project's.
"""


def write_card(path: Path, metrics: dict) -> None:
    """Fills the template from `metrics` (metrics.json)."""
    figures, corpus, run, training = (metrics[name] for name in ("figures", "corpus", "run", "training"))
    text, flops, params = figures["held_out_text"], figures["flops_per_token"], figures["num_params"]
    target_plan, train_tokens = run["target"], corpus["train"]["num_tokens"]
    values = {
        "context": text["context"],
        "target_params": params["target"],
        "draft_params": params["draft"],
        "target_bytes": metrics["num_bytes"]["target"],
        "draft_bytes": metrics["num_bytes"]["draft"],
        "target_flops": flops["target"] / 1e6,
        "draft_flops": flops["draft"] / 1e6,
        "cost_ratio": flops["target"] / flops["draft"],
        "held_out_files": corpus["held_out"]["num_files"],
        "held_out_mb": corpus["held_out"]["num_bytes"] / 1e6,
        "num_places": text["num_places"],
        "target_bpb": text["target_bits_per_byte"],
        "draft_bpb": text["draft_bits_per_byte"],
        "target_bpb_second": text["target_bits_per_byte_second_half"],
        "draft_bpb_second": text["draft_bits_per_byte_second_half"],
        "agreement": text["greedy_agreement"],
        "overlap": text["one_minus_tv"],
        "warm": figures["own_samples_t0.8"],
        "greedy": figures["own_samples_greedy"],
        "python": metrics["python"],
        "torch": metrics["torch"].partition("+")[0],
        "seed": corpus["seed"],
        "train_files": corpus["train"]["num_files"],
        "train_mb": corpus["train"]["num_bytes"] / 1e6,
        "train_tokens": train_tokens / 1e6,
        "listing": corpus["listing_sha256"],
        "t": target_plan,
        "t_epochs": target_plan["num_steps"] * target_plan["tokens_per_step"] / train_tokens,
        "t_minutes": training["target"]["minutes"],
        "t_loss": training["target"]["loss"],
        "t_nats": text["target_nats_per_token"],
        "w": run["draft_warm"],
        "w_minutes": training["draft_warm"]["minutes"],
        "d": run["draft"],
        "r": run["draft_refined"],
        "d_minutes": training["draft"]["minutes"],
        "r_minutes": training["draft_refined"]["minutes"],
        "r_kl": training["draft_refined"]["kl"],
        "r_tv": training["draft_refined"]["tv"],
        "d_tv_share": 1 - run["draft"]["tv_from"],
        "r_tv_share": 1 - run["draft_refined"]["tv_from"],
        "d_epochs": (run["draft"]["num_steps"] + run["draft_refined"]["num_steps"])
        * run["draft"]["tokens_per_step"]
        / (run["sample"]["num_tokens"] + run["annotate"]["num_text_tokens"]),
        "sample_tokens": run["sample"]["num_tokens"] / 1e6,
        "text_tokens": run["annotate"]["num_text_tokens"] / 1e6,
        "num_prompts": metrics["num_prompts"],
    }
    path.write_text(TEMPLATE.format(**values))
