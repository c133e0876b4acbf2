"""The model in a notebook."""

from __future__ import annotations

from megatron_flex.notebook_html import WARN_COLOUR, html_fragment, html_line
from megatron_flex.model.showing import format_headline, collect_site_hooks
from megatron_flex.runtime import Session
from megatron_flex.view import fold_layers, build_tree
from megatron_flex.view.tree_notebook import tree_html


class Notebook:
    """What FlexModel is in a notebook."""

    session: Session

    def _repr_html_(self) -> str:
        """The tree that `show()` prints, folding. Communicates nothing; only the leader has the tree."""
        session = self.session
        head = f"FlexModel · {format_headline(session)}"
        if not session.is_leader:
            here = ", ".join(f"{a.name} {a.coord}" for a in session.mesh.axes if a.size > 1)
            first = "of all" if session.over_data else "of its model replica"
            notice = (
                f"This rank ({here}) is no leader: what hooks read arrives on the first rank {first}, so "
                "look at the model there; flex.show(file=sys.stdout) prints the tree on any rank"
            )
            return html_fragment(head, html_line(notice, WARN_COLOUR))
        root = build_tree(session.sites, session.mesh.sizes, collect_site_hooks(session))
        return tree_html(fold_layers(root), head)
