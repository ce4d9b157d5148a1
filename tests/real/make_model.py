"""Make the tiny model in tests/real/model: a two-layer Qwen3 that knows a few conversations by heart.

    .real/venv/bin/python tests/real/make_model.py OUT [--steps 500]

Greedy output is then fixed and has what a router must carry: tool calls, reasoning, JSON, characters split over tokens.
Takes about 80 s on two cores. The files it wrote are part of the checkout; run it again only to change the model, since
another machine's arithmetic may give other weights (the same conversations all the same).
"""

from __future__ import annotations

import argparse
import codecs
import contextlib
import io
import json
import random
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

with contextlib.redirect_stdout(io.StringIO()):
    import this

ZEN = codecs.decode(this.s, "rot13")
CONTEXT = 4096

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}

Message = dict[str, str]
Conversation = tuple[list[Message], list[dict[str, Any]] | None, str]


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def call(*cities: str) -> str:
    """What the model says to call get_weather once per city, in the form that the hermes parser reads."""
    form = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "%s"}}\n</tool_call>'
    return "\n".join(form % city for city in cities)


def conversations() -> list[Conversation]:
    """Messages, tools and the one answer to each."""
    known: list[Conversation] = [
        ([user("Say hello.")], None, "Hello! How can I help you today?"),
        ([user("Count to twenty.")], None, ", ".join(str(i) for i in range(1, 21)) + "."),
        (
            [user("What is 2+3?")],
            None,
            "<think>\nThe user asks for 2+3. Two and three make five.\n</think>\n\nThe answer is 5.",
        ),
        (
            [user("What is 4+4?")],
            None,
            "<think>\nThe user asks for 4+4. Four and four make eight.\n</think>\n\nThe answer is 8.",
        ),
        ([user("Write Japanese.")], None, "こんにちは、世界！🎉 Ünïcödé — naïve café, 你好 👩‍💻."),  # noqa: RUF001
        ([user("Recite the zen.")], None, ZEN),
        ([user("Write JSON.")], None, '{"name": "Ada", "age": 36}'),
    ]
    for city in ("Paris", "Berlin", "Tokyo", "Rome"):
        asked = user(f"What is the weather in {city}?")
        result = {"role": "tool", "content": '{"temp": 21}'}
        known.append(([asked], [WEATHER], call(city)))
        known.append(
            ([asked, {"role": "assistant", "content": call(city)}, result], [WEATHER], f"It is 21 degrees in {city}.")
        )
    known.append(([user("Compare Paris and Rome.")], [WEATHER], call("Paris", "Rome")))
    thought = "<think>\nI should call the weather tool.\n</think>\n\n"
    known.append(([user("Think, then check Tokyo.")], [WEATHER], thought + call("Tokyo")))
    known.append(([user("Say hello.")], [WEATHER], "Hello! How can I help you today?"))
    return known


CHAT_TEMPLATE = r"""
{%- macro txt(c) %}
  {%- if c is string %}{{- c }}
  {%- elif c %}{%- for p in c %}{%- if p.type == 'text' %}{{- p.text }}{%- endif %}{%- endfor %}
  {%- endif %}
{%- endmacro %}
{%- if tools %}
  {{- '<|im_start|>system\n' }}
  {%- if messages and messages[0].role == 'system' %}{{- txt(messages[0].content) + '\n\n' }}{%- endif %}
  {{- "# Tools\n<tools>" }}
  {%- for tool in tools %}{{- "\n" }}{{- tool | tojson }}{%- endfor %}
  {{- "\n</tools>\n<|im_end|>\n" }}
{%- elif messages and messages[0].role == 'system' %}
  {{- '<|im_start|>system\n' + txt(messages[0].content) + '<|im_end|>\n' }}
{%- endif %}
{%- for message in messages %}
  {%- if message.role == 'system' and loop.first %}
  {%- elif message.role == 'tool' %}
    {{- '<|im_start|>user\n<tool_response>\n' + txt(message.content) + '\n</tool_response><|im_end|>\n' }}
  {%- else %}
    {{- '<|im_start|>' + message.role + '\n' }}
    {{- txt(message.content) }}
    {%- for tc in message.tool_calls or [] %}
      {%- set f = tc.function if tc.function else tc %}
      {{- '<tool_call>\n{"name": "' + f.name + '", "arguments": ' }}
      {%- if f.arguments is string %}{{- f.arguments }}{%- else %}{{- f.arguments | tojson }}{%- endif %}
      {{- '}\n</tool_call>' }}
    {%- endfor %}
    {{- '<|im_end|>\n' }}
  {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
  {{- '<|im_start|>assistant\n' }}
  {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\n\n</think>\n\n' }}{%- endif %}
{%- endif %}
""".strip()


def write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")


def make_tokenizer(out: Path, corpus: str) -> tuple[int, dict[str, int]]:
    """A byte-level BPE of some 750 tokens: small enough that emoji and kanji are split. Returns its size and specials."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=1000, initial_alphabet=alphabet, special_tokens=[], show_progress=False)
    tokenizer.train_from_iterator([corpus], trainer)
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    marks = ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>"]
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in marks])
    tokenizer.save(str(out / "tokenizer.json"))
    return tokenizer.get_vocab_size(), {token: tokenizer.token_to_id(token) for token in special}


def make_config(out: Path, vocabulary: int, special: dict[str, int]) -> None:
    end, pad = special["<|im_end|>"], special["<|endoftext|>"]
    (out / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")
    write_json(
        out / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": None,
            "eos_token": "<|im_end|>",
            "pad_token": "<|endoftext|>",
            "unk_token": None,
            "model_max_length": CONTEXT,
            "clean_up_tokenization_spaces": False,
            "add_prefix_space": False,
        },
    )
    write_json(
        out / "config.json",
        {
            "architectures": ["Qwen3ForCausalLM"],
            "model_type": "qwen3",
            "torch_dtype": "float32",
            "hidden_size": 128,
            "intermediate_size": 256,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 32,
            "vocab_size": (vocabulary + 63) // 64 * 64,
            "max_position_embeddings": CONTEXT,
            "rms_norm_eps": 1e-6,
            "rope_theta": 10000.0,
            "hidden_act": "silu",
            "tie_word_embeddings": False,
            "bos_token_id": None,
            "eos_token_id": end,
            "pad_token_id": pad,
            "attention_bias": False,
            "initializer_range": 0.05,
        },
    )
    write_json(out / "generation_config.json", {"eos_token_id": [end, pad], "pad_token_id": pad, "do_sample": False})


def train(out: Path, steps: int) -> None:
    """Train by heart, save, and say how many conversations greedy decoding gets right."""
    known = conversations()
    tokenizer = AutoTokenizer.from_pretrained(out)
    torch.manual_seed(0)
    dice = random.Random(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(out)).float()
    model.train()

    def ids(text: str) -> list[int]:
        return list(tokenizer(text, add_special_tokens=False).input_ids)

    def example(
        messages: list[Message], tools: list[dict[str, Any]] | None, answer: str
    ) -> tuple[list[int], list[int]]:
        """Token ids and labels; system prompts and the no-thinking form vary, so that both are known at run time."""
        system = dice.choice([None, None, "You are a helpful assistant.", "Be brief."])
        messages = ([{"role": "system", "content": system}] if system else []) + messages
        plain = "<think>" in answer or dice.random() < 0.7
        options: dict[str, Any] = {} if plain else {"enable_thinking": False}
        prompt = ids(
            tokenizer.apply_chat_template(messages, tools=tools, add_generation_prompt=True, tokenize=False, **options)
        )
        target = ids(answer + "<|im_end|>")
        return prompt + target, [-100] * len(prompt) + target

    zen = ids(ZEN)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 4e-3, total_steps=steps)
    for step in range(steps):
        batch = [example(*dice.choice(known)) for _ in range(12)]
        cut = dice.randrange(max(1, len(zen) - 60))
        text = zen[cut:] if dice.random() < 0.5 else zen
        batch.append((text, text))
        width = max(len(tokens) for tokens, _ in batch)
        inputs = torch.tensor([tokens + [0] * (width - len(tokens)) for tokens, _ in batch])
        labels = torch.tensor([label + [-100] * (width - len(label)) for _, label in batch])
        loss = model(input_ids=inputs, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 50 == 0 or step == steps - 1:
            print(f"step {step}: loss {loss.item():.4f}", flush=True)
    model.eval()
    model.save_pretrained(out)

    right = 0
    for messages, tools, answer in known:
        prompt = tokenizer.apply_chat_template(
            messages, tools=tools, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        output = model.generate(**prompt, max_new_tokens=500, do_sample=False)[0, prompt["input_ids"].shape[1] :]
        said = tokenizer.decode(output, skip_special_tokens=True)
        right += said == answer
        if said != answer:
            print(f"missed {messages[-1]['content']!r}: {said[:150]!r}")
    print(f"learned {right} of {len(known)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--steps", type=int, default=500)
    arguments = parser.parse_args()
    out: Path = arguments.out
    out.mkdir(parents=True, exist_ok=True)
    known = conversations()
    corpus = ZEN + "\n".join(message["content"] for messages, _, _ in known for message in messages) * 2
    corpus += "\n".join(answer for _, _, answer in known if answer.isascii()) + json.dumps(WEATHER)
    corpus += "<|im_start|>system user assistant tool # Tools <tools></tools>" * 20
    make_config(out, *make_tokenizer(out, corpus))
    train(out, arguments.steps)


if __name__ == "__main__":
    main()
