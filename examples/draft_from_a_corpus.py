"""Index some source files, draft from them, and see what that saves."""

from pathlib import Path
from tempfile import TemporaryDirectory

import torch

import retrodraft
from retrodraft import RetroDraft
from retrodraft.index import CorpusIndex, tokenizer_facts
from retrodraft.index.ingest import IngestReport, Text, tokenize
from retrodraft.models import load_model

model, tokenizer = load_model()
source = Path(retrodraft.__file__).parent
texts = {name: (source / name).read_text(encoding="utf-8") for name in ("tree.py", "stats.py", "outputs.py")}
prompt = tokenizer("".join(texts["tree.py"].splitlines(keepends=True)[:12]), return_tensors="pt")
options = dict(max_new_tokens=60, do_sample=False)
plain = model.generate(**prompt, **options)

with TemporaryDirectory() as folder:
    # What `retrodraft index build tree.py stats.py outputs.py -o my.index` does, for files of any number and size.
    documents = tokenize([Text(name, text) for name, text in texts.items()], tokenizer, IngestReport())
    CorpusIndex.build(documents, f"{folder}/my.index", tokenizer=tokenizer_facts(tokenizer))

    for name, corpora in (("without", []), ("with", [f"{folder}/my.index"])):
        rd = RetroDraft(model, tokenizer, corpora=corpora)
        output = rd.generate(**prompt, **options)
        print(f"{name} the corpus: {rd.stats.tokens_per_forward:.2f} tokens per forward")
        print("same as plain generate:", torch.equal(output, plain))
