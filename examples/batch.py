"""A left-padded batch: each row accepts as many tokens as its own draft deserves."""

from retrodraft import RetroDraft
from retrodraft.models import load_model

model, tokenizer = load_model()
rd = RetroDraft(model, tokenizer)

tokenizer.padding_side = "left"
inputs = tokenizer(
    ["one two three one two three one two", "The capital of France is", "def add(a, b):\n    return"],
    return_tensors="pt",
    padding=True,
)
output = rd.generate(**inputs, max_new_tokens=30, do_sample=False)
for row in output[:, inputs.input_ids.shape[1] :]:
    print(repr(tokenizer.decode(row, skip_special_tokens=True)))
print(rd.stats)
