"""
Evaluation of models: on recordings (``drive``), in simulated rooms (``quality``), as decisions in tasks where things
move (``control``), and the pages that show it (``report``).

Nothing here runs on a robot; the loop that is judged is ``control``, and the networks are those of ``engine``.
"""
