"""Dockerfiles with their build contexts, for test_dockerfile.py. BASE stands for the base's reference."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

Content = str | bytes | tuple[str] | None  # text, bytes, a link's target, a folder


@dataclass(frozen=True)
class Case:
    """``run``: arguments with which, and without which, the image is started; ``differs``: paths that may differ."""

    name: str
    text: str
    files: Mapping[str, Content] = field(default_factory=dict)
    modes: Mapping[str, int] = field(default_factory=dict)
    arguments: tuple[str, ...] = ()
    target: str = ""
    run: tuple[str, ...] | None = None
    differs: tuple[str, ...] = ()


TREE: Mapping[str, Content] = {
    "src/one.py": "1\n",
    "src/two.txt": "2\n",
    "src/.hidden": "h\n",
    "src/sub/deep/three": "3\n",
    "src/sub/.h": "x\n",
    "src/link": ("one.py",),
    "src/sub/up": ("../two.txt",),
    "src/empty": None,
}

ENVIRONMENT = [
    Case("env-of-base", "FROM BASE\nRUN echo $FROM_BASE >/o\nENV FROM_BASE=x$FROM_BASE\nRUN echo $FROM_BASE >/p"),
    Case(
        "env-letters",
        "FROM BASE\nENV A='$x' B='`c`' C=~/d:~ D=\\\\ E=\"it's\" F='\"q\"' G='a;b #c' H='(*)'\n"
        'RUN printf "%s." "$A" "$B" "$C" "$D" "$E" "$F" "$G" "$H" >/o\nENV I=$A\nENV J=${E}',
    ),
    Case(
        "env-forms",
        'FROM BASE\nENV A=1 B="two words" C=\'A  b\' D=a\\ b\nENV E some  text "q"\nRUN echo $A $B $C $D >/o',
    ),
    Case("env-one-line", "FROM BASE\nENV abc=hello\nENV abc=bye def=$abc\nENV ghi=$abc\nRUN echo $def $ghi >/o"),
    Case("env-path", 'FROM BASE\nENV PATH=/opt/x:$PATH\nENV PATH="${PATH}:/last"\nRUN echo $PATH >/o'),
    Case(
        "env-modifiers",
        "FROM BASE\nENV A=${X:-dflt} B=${FROM_BASE:+set} C=${X:+no} D=${FROM_BASE:-no} E=${X:-${FROM_BASE}}",
    ),
    Case("env-empty", 'FROM BASE\nENV A= B=""\nENV C=x$A-y\nRUN echo "<$A$B$C>" >/o'),
    Case(
        "env-between", 'FROM BASE\nRUN echo "<$A>" >/o1\nENV A=1\nRUN echo "<$A>" >/o2\nENV A=2\nRUN echo "<$A>" >/o3'
    ),
    Case(
        "arg-default",
        "FROM BASE\nARG A=1\nARG B=${A}2\nARG C\nRUN echo \"$A $B <$C>\" >/o; env | grep -c '^C=' >>/o; true",
    ),
    Case("arg-given", 'FROM BASE\nARG A=1\nARG C\nRUN echo "$A $C" >/o', arguments=("A=new", "C=c c")),
    Case(
        "arg-before-from", 'ARG TAG=x\nARG IMG=BASE\nFROM $IMG\nRUN echo "<$TAG>" >/o\nARG TAG\nRUN echo "<$TAG>" >>/o'
    ),
    Case(
        "arg-env-wins",
        "FROM BASE\nARG A=arg\nENV A=env\nRUN echo $A >/o\nARG A=later\nRUN echo $A >>/o",
        arguments=("A=given",),
    ),
    Case("arg-in-env", "FROM BASE\nARG V=1\nENV V=${V}\nENV W=$V.2\nRUN echo $V $W >/o", arguments=("V=7",)),
    Case("arg-base-env", "FROM BASE\nARG FROM_BASE=no\nENV G=$FROM_BASE"),
    Case(
        "arg-scope",
        'FROM BASE AS one\nARG A=1\nRUN echo $A >/o1\nFROM one\nRUN echo "<$A>" >/o2\nARG A\nRUN echo "<$A>" >/o3',
    ),
    Case(
        "expand-places",
        'FROM BASE\nARG D=/data V=1\nENV N=a.txt\nWORKDIR $D/v${V}\nCOPY ${N} $D/$V/\nLABEL v=$V d="$D x"\nRUN pwd >/o',
    ),
    Case(
        "dollar-escape",
        "FROM BASE\nARG A=1\nLABEL l=\\$A m='$A' n=\"\\$A\"\nRUN echo \\$A '$A' \"$A\" $$A >/dev/null; echo \\$A >/o",
    ),
]

RUN = [
    Case("run-shell", "FROM BASE\nRUN echo one >/o; false; echo two >>/o"),
    Case("run-pipe", "FROM BASE\nRUN false | true\nRUN false || echo or >/o\nRUN ! false"),
    Case(
        "run-no-leak",
        'FROM BASE\nRUN cd /tmp && X=1 && export Y=2\nRUN pwd >/o; echo "<$X$Y>" >>/o\nRUN umask 077\nRUN touch /p',
    ),
    Case("run-exec", 'FROM BASE\nRUN ["sh", "-c", "echo $PATH \'a b\' > /o"]\nRUN ["/bin/mkdir", "-p", "/a b/$c"]'),
    Case("run-not-json", "FROM BASE\nRUN [ -d /etc ] && echo yes >/o\nRUN ['a', 'b'] || echo no >/p"),
    Case(
        "run-continued",
        "FROM BASE\n"
        "RUN echo a \\\n"
        "   b \\\n"
        "# remark\n"
        "  # indented\n"
        "\n"
        "   c >/o && \\\n"
        "echo 'x \\\n"
        "y' >/p && \\\n"
        '  echo "x \\\n'
        '  y" >/q',
    ),
    Case("run-joined-words", "FROM BASE\nRUN echo ab\\\ncd >/o && echo ef \\\ngh >/p"),
    Case("run-comment", "FROM BASE\nRUN echo a # b \\\n c\nRUN echo 'a # b' >/o # end"),
    Case("run-quotes", 'FROM BASE\nRUN echo "it\'s" \'a "b"\' "\\$x" \\\n  `echo c` $(echo "d \'e\'") >/o'),
    Case("run-percent", "FROM BASE\nRUN printf '%s\\n' '%post' '{{ name }}' \"{{x}}\" >/o"),
    Case("run-escape", "# escape=`\nFROM BASE\nRUN echo a\\b `\n  c >/o\nENV A=x` y B=C:\\d"),
    Case(
        "run-directives",
        "# escape=\\\n\n# remark\nFROM BASE\nRUN echo a >/o \\\n && true",
    ),
    Case("run-braces", "FROM BASE\nRUN { echo a; echo b; } >/o && (cd /tmp; pwd) >>/o && f() { echo $1; } && f x >>/o"),
    Case(
        "run-loop",
        "FROM BASE\n"
        "RUN for i in 1 2 3; do echo $i; done >/o; if true; then echo t >>/o; fi; case x in x) "
        "echo c >>/o;; esac",
    ),
    Case("run-set-e", "FROM BASE\nRUN set -e; echo a >/o; (exit 0); echo b >>/o\nRUN set -eux && false || echo c >>/o"),
    Case("run-exit", "FROM BASE\nRUN echo a >/o; exit 0; echo b >>/o\nRUN trap 'echo t >>/o' EXIT; echo c >>/o"),
    Case("run-case", "from BASE\nrun echo a >/o\nEnv A=1\nworkDir /w"),
    Case(
        "run-modes",
        "FROM BASE\n"
        "RUN mkdir -m 1777 /t && touch /t/f && chmod 4750 /t/f && chown 99:77 /t/f && ln -s f /t/l "
        "&& ln /t/f /t/h",
    ),
    Case(
        "run-removes",
        "FROM BASE\nRUN rm /opt/full/old && rmdir /home/app\nRUN mkdir /home/app && echo n >/opt/full/new",
    ),
    Case("run-home", "FROM BASE\nRUN echo $HOME >/o && echo ~ >>/o && id -u >>/o"),
    Case(
        "shell",
        "FROM BASE\n"
        'SHELL ["/bin/bash", "-o", "pipefail", "-c"]\n'
        "RUN (false | true) || echo failed >/o\n"
        'RUN x=(a b); echo ${x[1]} "it\'s" >>/o',
    ),
    Case(
        "shell-back",
        "FROM BASE\n"
        'SHELL ["bash", "-c"]\n'
        "RUN echo $BASH_VERSION | head -c1 >/dev/null; echo ${PATH^^} >/o\n"
        'SHELL ["/bin/sh", "-c"]\n'
        "RUN echo $PATH >>/o",
    ),
    Case(
        "mount-cache",
        "FROM BASE\n"
        "RUN --mount=type=cache,target=/caches echo x >/caches/f; ls /caches >/o\n"
        "RUN ls -A /caches >>/o; true",
    ),
    Case(
        "mount-tmpfs",
        "FROM BASE\n"
        "RUN --mount=type=tmpfs,target=/scratch mkdir /scratch/d && echo y >/scratch/d/f && cat /scratch/d/f >/o",
    ),
    Case(
        "mount-bind",
        "FROM BASE\nRUN --mount=type=bind,source=src,target=/in cat /in/one.py /in/sub/deep/three >/o",
        {k: v for k, v in TREE.items() if not isinstance(v, tuple)},
    ),
    Case(
        "mount-from",
        "FROM BASE AS b\n"
        "RUN mkdir /w && echo w >/w/f && ln -s f /w/l\n"
        "FROM BASE\n"
        "RUN --mount=type=bind,from=b,source=/w,target=/in \\\n"
        "    cat /in/l >/o",
    ),
]

USERS = [
    Case(
        "workdir",
        "FROM BASE\nWORKDIR /a\nWORKDIR b/c\nRUN pwd >/o\nWORKDIR ../d\nRUN pwd >>/o\nWORKDIR /\nRUN pwd >>/o",
    ),
    Case(
        "workdir-exists",
        "FROM BASE\nWORKDIR /opt/full\nRUN ls >/o; chmod 711 .\nWORKDIR /opt/full\nRUN stat -c %a . >>/o",
    ),
    Case(
        "user",
        "FROM BASE\nUSER app\nRUN id >/pub/o; echo $HOME >>/pub/o; touch /home/app/f\nUSER root\nRUN id -u >>/pub/o",
    ),
    Case(
        "user-number",
        "FROM BASE\n"
        "USER 99\n"
        "RUN id >/pub/o; echo $HOME >>/pub/o\n"
        "USER 1234\n"
        "RUN id -u >/pub/p; id -g >>/pub/p; echo $HOME >>/pub/p",
    ),
    Case(
        "user-group",
        "FROM BASE\nUSER app:more\nRUN id -u >/pub/o; id -g >>/pub/o\nUSER 5:6\nRUN id -u >>/pub/p; id -g >>/pub/p",
    ),
    Case("user-workdir", "FROM BASE\nUSER app\nWORKDIR /w/x\nRUN touch f\nCOPY a.txt .\nWORKDIR y"),
    Case(
        "user-exec",
        "FROM BASE\n"
        "USER app\n"
        'RUN ["sh", "-c", "id -u > /pub/o"]\n'
        'SHELL ["bash", "-c"]\n'
        "RUN echo ${PATH:0:4} it\\'s >>/pub/o",
    ),
    Case("user-number-workdir", "FROM BASE\nUSER 99\nWORKDIR /n/m\nUSER 1234\nWORKDIR /k\nUSER app:more\nWORKDIR /j"),
]

COPIES = [
    Case("copy-file", 'FROM BASE\nCOPY a.txt /x/b.txt\nCOPY a.txt /y/\nCOPY a.txt z\nCOPY ["a.txt", "/q r/"]'),
    Case("copy-into-folder", "FROM BASE\nCOPY a.txt /opt/full\nCOPY a.txt /opt"),
    Case("copy-folder", "FROM BASE\nCOPY src /new\nCOPY src /opt/full/", TREE),
    Case("copy-dot", "FROM BASE\nWORKDIR /app\nCOPY . .\nRUN rm Dockerfile", TREE),
    Case("copy-dot-root", "FROM BASE\nCOPY src/ /", TREE, differs=("empty",)),
    Case("copy-several", "FROM BASE\nCOPY a.txt src/one.py src/sub /m/", TREE),
    Case(
        "copy-modes",
        "FROM BASE\nCOPY src /m\nCOPY src/one.py /one",
        TREE,
        {"src/one.py": 0o755, "src/two.txt": 0o600, "src/sub": 0o700, "src": 0o711},
    ),
    Case(
        "copy-wildcard",
        "FROM BASE\nCOPY src/*.py a?txt /w/\nCOPY src/s* /s/\nCOPY src/[!o]*.txt nothing* /v/\nCOPY none* /gone/",
        TREE,
    ),
    Case(
        "copy-links", "FROM BASE\nCOPY src/link /l\nCOPY src/link /d/\nCOPY folder /f", {**TREE, "folder": ("src/sub",)}
    ),
    Case(
        "copy-overlay",
        "FROM BASE\nCOPY a.txt /x\nRUN cat /x >/o\nCOPY src/one.py /x\nRUN cat /x >>/o\nCOPY src/two.txt /x",
        TREE,
    ),
    Case("copy-over-copy", "FROM BASE\nCOPY src /x\nCOPY a.txt /x/one.py\nCOPY a.txt /x/link", TREE),
    Case("copy-over-base", "FROM BASE\nCOPY a.txt /opt/full/old\nCOPY a.txt /tmp/t"),
    Case(
        "copy-run-order",
        "FROM BASE\nRUN mkdir /x && echo r >/x/r\nCOPY src /x\nRUN ls -A /x >/o\nCOPY a.txt /x/r",
        TREE,
    ),
    Case(
        "copy-chown",
        "FROM BASE\nCOPY --chown=99:77 src/sub /c/d\nCOPY --chown=0:0 a.txt /r\nCOPY --chown=app:more a.txt /c/",
        TREE,
        differs=("c", "c/d"),
    ),
    Case("copy-chmod", "FROM BASE\nCOPY --chmod=640 a.txt /m1\nCOPY --chmod=0755 src/sub /m2", TREE),
    Case(
        "copy-blank-names",
        'FROM BASE\nCOPY ["a b", "c d/"]\nCOPY q /q',
        {"a b/f g": "1", "q/it's": "2", "q/a*b": "3", "q/[x]": "4", "q/$y": "5"},
    ),
    Case("copy-empty", "FROM BASE\nCOPY e /e\nCOPY e2 /opt/full", {"e": None, "e2/in": None}),
    Case(
        "ignore",
        "FROM BASE\nCOPY . /c\nRUN rm -f /c/Dockerfile",
        {**TREE, ".dockerignore": "# c\n*.txt\n!a.txt\nsrc/sub/**\n!src/sub/deep/three\n.dockerignore\n"},
    ),
    Case(
        "ignore-stars",
        "FROM BASE\nCOPY . /c\nRUN rm -f /c/Dockerfile",
        {**TREE, "x/y/one.py": "n", ".dockerignore": "**/*.py\n/src/empty\nsrc/*/deep\n"},
    ),
    Case("ignore-all", "FROM BASE\nCOPY src /c", {**TREE, ".dockerignore": "*\n!src/o*\n!src/sub/.h\n"}),
    Case("add-file", "FROM BASE\nADD a.txt src /d/\nADD a.txt /e", TREE),
]

STAGES = [
    Case(
        "stage",
        "FROM BASE AS build\n"
        "RUN mkdir -p /out/s && echo o >/out/o && ln -s o /out/l && chmod 700 /out/s && chown 99:77 /out/o\n"
        "FROM BASE\n"
        "COPY --from=build /out /opt/new\n"
        "COPY --from=build /out/o /f\n"
        "COPY --from=build /out/o /g/",
    ),
    Case(
        "stage-number",
        "FROM BASE\n"
        "RUN echo 0 >/n\n"
        "FROM BASE AS b\n"
        "COPY --from=0 /n /m\n"
        "RUN echo 1 >>/m\n"
        "FROM BASE\n"
        "COPY --from=1 /m /k\n"
        "COPY --from=b /m /l",
    ),
    Case(
        "stage-on-stage",
        "FROM BASE AS one\n"
        "ENV A=1\n"
        "WORKDIR /w\n"
        "RUN echo $A >f\n"
        "FROM one AS two\n"
        "RUN cat f >g\n"
        "FROM two\n"
        "ENV B=$A\n"
        "COPY --from=one /w/f ./h",
    ),
    Case(
        "stage-merge",
        "FROM BASE AS b\n"
        "RUN mkdir /x && echo n >/x/new && echo o >/x/old && mkdir -m 711 /x/d\n"
        "FROM BASE\n"
        "COPY --from=b /x /opt/full\n"
        "COPY --from=b /x /opt/full/",
    ),
    Case(
        "stage-links",
        "FROM BASE AS b\n"
        "RUN mkdir /x && echo n >/x/so.1 && ln -s so.1 /x/so && ln -s x /y\n"
        "FROM BASE\n"
        "COPY --from=b /x/so /l/\n"
        "COPY --from=b /y /m\n"
        "COPY --from=b /x/so* /n/",
    ),
    Case(
        "stage-target",
        "FROM BASE AS a\nRUN echo a >/a\nFROM a AS b\nRUN echo b >/b\nFROM BASE\nRUN echo c >/c",
        target="b",
    ),
    Case(
        "stage-chown",
        "FROM BASE AS b\n"
        "RUN mkdir /x && echo n >/x/f && chmod 640 /x/f\n"
        "FROM BASE\n"
        "COPY --from=b --chown=99:77 /x/f /c1",
    ),
    Case("stage-image", "FROM BASE\nCOPY --from=BASE /opt/full/old /copied\nCOPY --from=BASE /opt/full /cf"),
]

STARTS = [
    Case("start-exec", 'FROM BASE\nENTRYPOINT ["echo", "a b", "$FROM_BASE"]\nCMD ["c  d", "it\'s"]', run=("x", "y z")),
    Case("start-shell", 'FROM BASE\nENV V=v\nENTRYPOINT echo $V "$0" $1\nCMD ["c", "d"]', run=("x", "y")),
    Case("start-cmd", 'FROM BASE\nWORKDIR /opt/full\nCMD ["cat", "old"]', run=("echo", "a  b")),
    Case("start-cmd-shell", "FROM BASE\nWORKDIR /opt/full\nCMD pwd && ls", run=("pwd",)),
    Case(
        "start-reset",
        'FROM BASE AS a\nENTRYPOINT ["echo", "e"]\nCMD ["c"]\nFROM a\nENTRYPOINT ["echo", "f"]',
        run=("x",),
    ),
    Case(
        "config",
        "FROM BASE AS one\nARG P=9\nEXPOSE 80 8000-8002/udp $P\nVOLUME /v /w\nUSER app\nWORKDIR /home/app\n"
        "STOPSIGNAL SIGINT\nHEALTHCHECK --interval=1m30s --timeout=2s --start-period=500ms --retries=2 CMD test -e /x\n"
        'CMD ["sh"]\nFROM one\nEXPOSE 443/tcp\nVOLUME ["/y z"]\nENTRYPOINT echo a $P\nSHELL ["bash", "-c"]\n'
        "ONBUILD RUN echo later\nUSER root",
    ),
    Case("config-none", "FROM BASE\nUSER 99:77\nHEALTHCHECK NONE\nENTRYPOINT []\nCMD [] "),
    Case("config-health", 'FROM BASE\nHEALTHCHECK CMD ["sh", "-c", "a b"]\nSTOPSIGNAL 9\nENTRYPOINT ["sh"]'),
    Case("config-triggers", "FROM BASE AS one\nONBUILD RUN echo t >/o\nFROM one\nRUN cat /o >/p"),
    Case(
        "labels",
        "FROM BASE\n"
        'LABEL a=1 b="two words"\n'
        "LABEL c three  x\n"
        'LABEL "d.e"="f"\n'
        "EXPOSE 80\n"
        "VOLUME /v\n"
        "STOPSIGNAL SIGINT\n"
        "RUN mkdir /v",
    ),
]

CASES = [*ENVIRONMENT, *RUN, *USERS, *COPIES, *STAGES, *STARTS]
