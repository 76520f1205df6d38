"""Programs for the environment of vLLM: a tiny model, an offline engine, load on a server.

usage: vllm_programs.py model FOLDER | offline MODEL | load URL. The last two print one JSON object.
"""

import json
import random
import sys
import threading
import urllib.request
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


def load(url: str) -> None:
    """Send bursts of requests to a server, and print the tokens that it reports."""
    random.seed(1)
    used = {"prompt_tokens": 0, "completion_tokens": 0}

    def ask(prompt: int, tokens: int) -> None:
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
        usage = json.load(urllib.request.urlopen(request, timeout=300))["usage"]
        for name in used:
            used[name] += usage[name]

    for requests, prompt, tokens in ((6, 60, 40), (2, 300, 3), (4, 20, 200)):
        threads = [threading.Thread(target=ask, args=(prompt, tokens)) for _ in range(requests)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    print(json.dumps(used))


if __name__ == "__main__":
    {"model": make_model, "offline": offline, "load": load}[sys.argv[1]](sys.argv[2])
