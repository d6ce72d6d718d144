"""Full fine-tuning with a gate: the export is the base, and in few bits what training changed."""

from __future__ import annotations

from collections.abc import Mapping

from pipeline.extension import Extension, FormatOption, OfferedFormat


class FullDifference(Extension):
    name = "full_difference"

    def export_formats(self) -> Mapping[str, OfferedFormat]:
        from pipeline.command_line import non_negative

        return {
            "difference": OfferedFormat(
                "of full fine-tuning with a gate: the base, and what training changed",
                "pipeline.extensions.full_difference.export_format:DIFFERENCE",
                options=(
                    FormatOption(
                        "--bits",
                        parse=int,
                        choices=(4, 8, 16),
                        help="with --format difference: the bits that store an element of a "
                        "layer's matrix (default: 4)",
                    ),
                    FormatOption(
                        "--min-count",
                        parse=non_negative,
                        help="with --format difference: how often a token must occur in the run's "
                        "new texts for rows of its own in embedding and output; all rarer tokens "
                        "share one; 0: all tokens have their own (default: 20)",
                    ),
                ),
            )
        }


EXTENSION = FullDifference()
