"""`kvq lessons`: the lessons of a checkout."""

from pathlib import Path

from kvq.commands.common import print_json, table


def add(commands):
    p = commands.add_parser("lessons", help="the lessons and where they are")
    p.add_argument("--json", action="store_true", help="print JSON")
    p.set_defaults(run=lessons)


def lessons(options):
    """List the lessons of the checkout that this package belongs to."""
    import kvq

    folder = Path(kvq.__file__).resolve().parents[1] / "lessons"
    found = [
        {
            "name": source.stem,
            "title": _title(source),
            "notebook": str(folder / f"{source.stem}.ipynb"),
            "page": str(page) if page.exists() else None,
        }
        for source in sorted((folder / "src").glob("[0-9][0-9]_*.py"))
        for page in [folder / "html" / f"{source.stem}.html"]
    ]
    if not found:
        raise ValueError("no lessons here: they are in a checkout, not in the package")
    if options.json:
        print_json(found)
        return
    rows = [[x["name"], "yes" if x["page"] else "no", x["title"]] for x in found]
    titles = ["notebook", "page built", "title"]
    print(*table([titles, *rows], left=(0, 1, 2)), sep="\n")
    print(f"notebooks: {folder}/NAME.ipynb; solutions: {folder}/solutions/NAME.ipynb")
    print(f"pages: {folder}/html/index.html, written by `make lessons`")


def _title(source):
    for line in source.read_text(encoding="utf-8").splitlines():
        if line.startswith("# # "):
            return line[4:]
    return source.stem
