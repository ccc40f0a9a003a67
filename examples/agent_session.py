"""An agent loop: each turn feeds its new tokens alone, and drafts from the file, tool output and earlier turns."""

from pathlib import Path

from retrodraft import RetroDraft, folders
from retrodraft.models import load_model

model, tokenizer = load_model()
rd = RetroDraft(model, tokenizer)

source = Path(folders.__file__).read_text(encoding="utf-8")
messages = [
    {"role": "system", "content": "You edit a Python file. Answer with code alone."},
    {"role": "user", "content": f"This is folders.py:\n\n{source}\nRepeat the function `keep`."},
]
tasks = ["Give `keep` a third argument `mode`.", "Now write it without the docstring.", ""]

with rd.session("edit-folders") as session:
    session.add_file("folders.py", source)  # without the text, the file on disk is read, and followed
    for task in tasks:
        output = session.generate(messages, max_new_tokens=48, do_sample=False)
        stats = session.stats
        answer = tokenizer.decode(output[0, stats.num_prompt_tokens :], skip_special_tokens=True)
        print(f"{stats.num_prompt_tokens} prompt tokens, {session.cached_tokens} of them cached:")
        print(f"  {stats.tokens_per_forward:.2f} tokens per forward, prefill {stats.prefill_seconds:.2f} s")
        print("  accepted by proposer:", dict(stats.num_accepted_tokens_by_proposer))

        source = source.replace("bytes", "str")  # the agent's edit, of which the tool reports
        session.add_file("folders.py", source)
        report = f"folders.py was written. It begins:\n{source[:300]}\n"
        session.observe(report)
        messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": report + task}]
print(session.total_stats)
