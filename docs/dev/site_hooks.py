"""What the site (mkdocs.yml) changes in a page: links to files outside docs/ become their names, and the marks of code
blocks, `check` and `slow`, go."""

import posixpath
import re

_LINK = re.compile(r"(?<!!)\[([^\]]+)\]\(([^)#\s:]+)(#[^)]*)?\)")
_MARK = re.compile(r"^(\s*```(?:python|bash)) (?:check|slow)$", re.MULTILINE)


def on_page_markdown(markdown, page, **_):
    """The page's text with links that the site can follow."""
    here = posixpath.dirname(page.file.src_uri)

    def inside(match):
        target = posixpath.normpath(posixpath.join(here, match[2]))
        return f"{match[1]} (`{target.lstrip('./')}`)" if target.startswith("..") else match[0]

    return _MARK.sub(r"\1", _LINK.sub(inside, markdown))
