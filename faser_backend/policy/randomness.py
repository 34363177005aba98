"""What each draw of rejection sampling is for, so that no two draws share noise.

Rejection sampling keys its uniforms by (seed, position, purpose, round): never by position alone,
since a rejected position is drawn again in the next round.
"""

PURPOSE_DRAFT = 1
PURPOSE_ACCEPT = 2
PURPOSE_RECOVER = 3
