"""Which files a corpus is made of: folder trees under .gitignore rules, without links, pipes and repeats."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from pathspec import GitIgnoreSpec

from retrodraft.index.storage import is_store

ALWAYS_IGNORED = (".git", ".hg", ".svn", "CVS", "__pycache__")


@dataclass(frozen=True)
class Skipped:
    """A file, or a part of one, that is not in the corpus."""

    name: str
    reason: str


@dataclass(frozen=True)
class FoundFile:
    """A regular file to be read."""

    path: Path
    size: int  # bytes


def find_files(
    paths: Sequence[Path | str],
    skipped: list[Skipped],
    *,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    gitignore: bool = True,
) -> list[FoundFile]:
    """Regular files among `paths` and in the folders among them, each inode once, in the order of the paths.

    A file that is named itself is always taken, and a folder searched. Inside folders links are never followed: what
    they point to inside is found anyway, and what lies outside has to be named. Version control's folders,
    `__pycache__` and stores of this package are left out.

    Args:
        skipped: gets pipes, sockets, unreadable folders and links to nothing or to what is not searched.
        include: patterns as in .gitignore, one of which a file in a folder has to match; none takes all.
        exclude: patterns of files and folders to leave out.
        gitignore: obey .gitignore files, also those above a path up to its repository's root.

    Raises:
        ValueError: a path is empty or does not exist, or a pattern is malformed.
    """
    if any(str(name) == "" for name in paths):
        raise ValueError("a path is empty; name a file or a folder")
    roots = tuple(Path(name).resolve() for name in paths)
    rules = _Rules(GitIgnoreSpec.from_lines(include), GitIgnoreSpec.from_lines(exclude), gitignore, roots)
    seen: set[tuple[int, int]] = set()
    found = []
    for name in paths:
        path = Path(name)
        try:
            mode = path.stat().st_mode
        except OSError as error:
            raise ValueError(f"{str(path)!r} can't be read: {error.strerror or error}") from error
        files = _walk(path, rules, skipped) if stat.S_ISDIR(mode) else [path]
        for file in files:
            try:
                status = file.stat()
            except OSError as error:
                skipped.append(Skipped(str(file), error.strerror or str(error)))
                continue
            if not stat.S_ISREG(status.st_mode):
                skipped.append(Skipped(str(file), "not a regular file"))
            elif (status.st_dev, status.st_ino) not in seen:
                seen.add((status.st_dev, status.st_ino))
                found.append(FoundFile(file, status.st_size))
    return found


@dataclass(frozen=True)
class _Rules:
    include: GitIgnoreSpec
    exclude: GitIgnoreSpec
    gitignore: bool
    roots: tuple[Path, ...]  # all that is searched


def _walk(root: Path, rules: _Rules, skipped: list[Skipped]) -> Iterator[Path]:
    """Files below `root`, folder by folder, names in order; depth costs no recursion."""
    above = _ignores_above(root) if rules.gitignore else ()
    if _ignored(root, True, above):
        above = ()  # it was named itself
    stack: list[tuple[Path, tuple[tuple[Path, GitIgnoreSpec], ...]]] = [(root, above)]
    while stack:
        folder, ignores = stack.pop()
        if rules.gitignore:
            ignores = (*ignores, *_ignore_file(folder))
        try:
            with os.scandir(folder) as entries:
                children = sorted(entries, key=lambda entry: entry.name)
            if is_store(folder):
                continue
        except OSError as error:
            skipped.append(Skipped(str(folder), error.strerror or str(error)))
            continue
        subfolders = []
        for child in children:
            path = folder / child.name
            is_folder = child.is_dir(follow_symlinks=False)
            name = path.relative_to(root).as_posix() + ("/" if is_folder else "")
            if child.name in ALWAYS_IGNORED or rules.exclude.match_file(name) or _ignored(path, is_folder, ignores):
                continue
            if child.is_symlink():
                reason = _leads_out(path, rules.roots)
                if reason:
                    skipped.append(Skipped(str(path), reason))
            elif is_folder:
                subfolders.append((path, ignores))
            elif not rules.include.patterns or rules.include.match_file(name):
                yield path
        stack.extend(reversed(subfolders))


def _leads_out(link: Path, roots: tuple[Path, ...]) -> str:
    """Why what a link points to will not be found otherwise; empty where it will."""
    try:
        target = link.resolve(strict=True)
    except (OSError, RuntimeError):
        return "link to nothing"
    inside = any(target.is_relative_to(root) for root in roots)
    return "" if inside else "link out of the folder; name its target to index it"


def _ignores_above(root: Path) -> tuple[tuple[Path, GitIgnoreSpec], ...]:
    """.gitignore files between `root`, not included, and the root of the repository around it, outermost first."""
    found: list[tuple[Path, GitIgnoreSpec]] = []
    folder = root.absolute()
    while not os.path.exists(folder / ".git"):  # pathlib's raises where a folder is closed
        if folder == folder.parent:
            return ()  # no repository
        folder = folder.parent
        found[:0] = _ignore_file(folder)
    return tuple(found)


def _ignore_file(folder: Path) -> list[tuple[Path, GitIgnoreSpec]]:
    """The rules of a folder's own .gitignore, if it has one."""
    path = folder / ".gitignore"
    try:
        if not path.is_file():
            return []
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
        return [(folder.absolute(), GitIgnoreSpec.from_lines(lines))]
    except (OSError, ValueError):  # unreadable, or a pattern that git would not take either
        return []


def _ignored(path: Path, is_folder: bool, ignores: tuple[tuple[Path, GitIgnoreSpec], ...]) -> bool:
    """Whether .gitignore rules leave `path` out; the innermost file that says anything decides."""
    absolute = path.absolute()
    for folder, spec in reversed(ignores):
        name = absolute.relative_to(folder).as_posix() + ("/" if is_folder else "")
        verdict = spec.check_file(name).include
        if verdict is not None:
            return verdict
    return False
