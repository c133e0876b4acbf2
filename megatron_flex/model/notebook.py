"""The model in a notebook."""

from __future__ import annotations

from megatron_flex.markup import WARN, fragment, line
from megatron_flex.model.showing import headline, standing
from megatron_flex.runtime import Session
from megatron_flex.view import folded, tree
from megatron_flex.view.notebook import in_html


class Notebook:
    """What FlexModel is in a notebook."""

    session: Session

    def _repr_html_(self) -> str:
        """The tree that `show()` prints, folding. Communicates nothing; only the leader has the tree."""
        session = self.session
        head = f"FlexModel · {headline(session)}"
        if not session.is_leader:
            here = ", ".join(f"{a.name} {a.coord}" for a in session.mesh.axes if a.size > 1)
            first = "of all" if session.over_data else "of its model replica"
            told = (
                f"This rank ({here}) is no leader: what hooks read arrives on the first rank {first}, so "
                "look at the model there; flex.show(file=sys.stdout) prints the tree on any rank"
            )
            return fragment(head, line(told, WARN))
        root = tree(session.sites, session.mesh.sizes, standing(session))
        return in_html(folded(root), head)
