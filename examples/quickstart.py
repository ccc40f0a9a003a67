"""Wrap a model, generate, and see what drafting saved."""

import torch

from retrodraft import RetroDraft
from retrodraft.models import load_model

model, tokenizer = load_model()  # the embedded model; any AutoModelForCausalLM will do
rd = RetroDraft(model, tokenizer)

messages = [{"role": "user", "content": "Write a haiku about rivers, then explain each line of it."}]
text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
inputs = tokenizer(text, return_tensors="pt")

output = rd.generate(**inputs, max_new_tokens=80, do_sample=False)
print(tokenizer.decode(output[0, inputs.input_ids.shape[1] :], skip_special_tokens=True))
print(rd.stats)

plain = model.generate(**inputs, max_new_tokens=80, do_sample=False)
print("same as plain generate:", torch.equal(output, plain))
