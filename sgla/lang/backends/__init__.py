"""Who answers the programs: a server of sgla, an engine in this process, any server of OpenAI's API."""
