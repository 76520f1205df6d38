"""Programs for the environment of vLLM: a tiny model, an offline engine, load on a server.

usage: vllm_programs.py model FOLDER | offline MODEL | load URL | clients URL COUNT PROMPT TOKENS.
``offline`` and ``load`` print one JSON object; ``clients`` does not end.
"""

import json
import random
import sys
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

PROMPTS, TOKENS = 8, 64


def make_model(folder: str) -> None:
    """Write a random Llama of two layers with a tokenizer of 1,000 words."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(0)
    words = {"<s>": 0, "</s>": 1, "<unk>": 2} | {f"w{i}": i + 3 for i in range(997)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    wrap: Any = PreTrainedTokenizerFast
    wrap(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    ).save_pretrained(folder)
    config = LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, head_dim=32, vocab_size=1000, max_position_embeddings=2048,
        bos_token_id=0, eos_token_id=1, dtype="float32",
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)


def offline(model: str) -> None:
    """Print the tokens of greedy requests through vLLM in this process."""
    from vllm import LLM, SamplingParams

    engine = LLM(
        model, max_model_len=512, enforce_eager=True, distributed_executor_backend="uni",
        dtype="float32",
    )  # fmt: skip
    prompts: list[Any] = [{"prompt_token_ids": [3 + i] * 20} for i in range(PROMPTS)]
    how = SamplingParams(max_tokens=TOKENS, ignore_eos=True, temperature=0)
    print(json.dumps([list(one.outputs[0].token_ids) for one in engine.generate(prompts, how)]))


def ask(url: str, prompt: int, tokens: int) -> dict[str, int]:
    """Send one request; return the tokens that the server reports."""
    body = {
        "model": "tiny",
        "prompt": [random.randrange(3, 999) for _ in range(prompt)],
        "max_tokens": tokens,
        "ignore_eos": True,
        "temperature": 0,
    }
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    usage: dict[str, int] = json.load(urllib.request.urlopen(request, timeout=300))["usage"]
    return usage


def at_once(count: int, target: Callable[[], None]) -> None:
    with ThreadPoolExecutor(count) as threads:
        for future in [threads.submit(target) for _ in range(count)]:
            future.result()


def load(url: str) -> None:
    """Send bursts of requests to a server, and print the tokens that it reports."""
    random.seed(1)
    used = {"prompt_tokens": 0, "completion_tokens": 0}

    def one(prompt: int, tokens: int) -> None:
        usage = ask(url, prompt, tokens)
        for name in used:
            used[name] += usage[name]

    for requests, prompt, tokens in ((6, 60, 40), (2, 300, 3), (4, 20, 200)):
        at_once(requests, partial(one, prompt, tokens))
    print(json.dumps(used))


def clients(url: str, count: int, prompt: int, tokens: int) -> None:
    """Send requests of about these lengths until the end of this process."""
    random.seed(1)

    def client() -> None:
        while True:
            ask(url, random.randint(prompt // 2, prompt), random.randint(tokens // 2, tokens))

    at_once(count, client)


if __name__ == "__main__":
    program, target, *rest = sys.argv[1:]
    programs: dict[str, Any] = {
        "model": make_model, "offline": offline, "load": load, "clients": clients,
    }  # fmt: skip
    programs[program](target, *map(int, rest))
