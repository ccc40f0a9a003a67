"""Three ways into a program that already calls `model.generate`: its own hook, a context manager, a pipeline."""

from transformers import pipeline

from retrodraft import RetroDraft
from retrodraft.models import load_model

model, tokenizer = load_model()
rd = RetroDraft(model, tokenizer)
inputs = tokenizer("The three primary colours are", return_tensors="pt")
options = dict(max_new_tokens=24, do_sample=False)

# 1. Hugging Face's hook.
output = model.generate(**inputs, custom_generate=rd, **options)
print(tokenizer.decode(output[0]), "|", rd.stats.num_target_forwards, "forwards")

# 2. Every call inside the block drafts; afterwards the model is as it was.
with rd.enabled():
    output = model.generate(**inputs, **options)

# 3. So does everything built on `generate`.
writer = pipeline("text-generation", model=model, tokenizer=tokenizer)
with rd.enabled():
    print(writer("The three primary colours are", **options)[0]["generated_text"])
print(rd.total_stats)
